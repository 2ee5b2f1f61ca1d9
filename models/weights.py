"""Initial weights from a safetensors file, whose names and shapes are checked against the network one by one.

Names are ours, or those under which the architecture's weights are published (``ModelSpec.published``). A file without
the last layer's tensors leaves that layer as initialised from the seed. A file is identified by its SHA-256.
"""

from __future__ import annotations

import hashlib
import logging
import re
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from models.layout import block_names, other_names
from partitions.common.errors import DataError

SHOWN = 3  # most faults in a message


@dataclass(frozen=True)
class Weights:
    """A file and its expected SHA-256; a file with another one is refused."""

    file: str
    sha256: str


def weights_of(file: Path) -> Weights:
    """Return the file with its present SHA-256. Raises DataError where it cannot be read."""
    try:
        found = file.stat()
        return _load_hashed(file, found.st_mtime_ns, found.st_size)
    except OSError as error:
        raise DataError(f"init-weights = {file}: {error.strerror}") from None


@lru_cache(maxsize=4)
def _load_hashed(file: Path, stamp: int, size: int) -> Weights:
    with file.open("rb") as content:
        return Weights(str(file), hashlib.file_digest(content, "sha256").hexdigest())


@lru_cache(maxsize=1)
def _tensors(weights: Weights) -> dict[str, Tensor]:
    """Return a file's tensors."""
    try:
        content = Path(weights.file).read_bytes()
    except OSError as error:
        raise DataError(f"init-weights = {weights.file}: {error.strerror}") from None
    if hashlib.sha256(content).hexdigest() != weights.sha256:
        raise DataError(
            f"init-weights = {weights.file} is another file than the run began with: its SHA-256 is not "
            f"{weights.sha256[:16]}..."
        )
    try:
        found = safetensors.torch.load(content)
    except safetensors.SafetensorError as error:
        raise DataError(
            f"init-weights = {weights.file} is no safetensors file: {' '.join(str(error).split())}"
        ) from None
    return dict(sorted(found.items()))


def our_name(name: str, published: tuple[tuple[str, str], ...]) -> str:
    """Return our name of a tensor in a published file; ``published`` has patterns and replacements."""
    for pattern, replacement in published:
        name = re.sub(pattern, replacement, name)
    return name


@torch.no_grad()
def start_from(
    network: nn.Module, weights: Weights, published: tuple[tuple[str, str], ...]
) -> nn.Module:
    """Load the file's weights and running statistics. Raises DataError, one line, where they do not fit.

    Counts of batches are ignored; of a tensor with several names, one is enough.
    """
    held = network.state_dict()
    wanted = {name: tensor for name, tensor in held.items() if tensor.is_floating_point()}
    given: dict[str, Tensor] = {}
    faults = []
    for name, tensor in _tensors(weights).items():
        ours = our_name(name, published)
        if not tensor.is_floating_point():
            counted = ours not in held or ours.endswith("num_batches_tracked")
            if not counted and not torch.equal(tensor, held[ours]):
                faults.append(f"{name} has other integers, which this network does not take")
            continue
        if ours not in wanted:
            faults.append(f"{name} is not known")
        elif ours in given:
            faults.append(f"{name} is there twice")
        elif (shape := tuple(tensor.shape)) != tuple(wanted[ours].shape):
            faults.append(f"{name} is of shape {shape}, not {tuple(wanted[ours].shape)}")
        given[ours] = tensor
    tied = {pair for pair in other_names(network).items() if pair[0] in wanted}
    for other, first in tied:
        if other in given and not torch.equal(
            given[other], given.setdefault(first, given[other])
        ):
            faults.append(f"{other} and {first} are one tensor here, and two in the file")
    given |= {other: given[first] for other, first in tied if first in given}
    block = f"{block_names(network)[-1]}."
    last = {name for name in wanted if name.startswith(block)} - dict(tied).keys()
    missing = [name for name in wanted if name not in given]
    if set(missing) == last:
        _tell(weights, ", ".join(missing))
    else:
        faults += [f"{name} is missing" for name in missing]
    if faults:
        more = f" and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
        raise DataError(
            f"init-weights = {weights.file} does not fit this network of {len(wanted)} tensors: "
            f"{'; '.join(faults[:SHOWN])}{more}"
        )
    for name, tensor in given.items():
        wanted[name].copy_(tensor)
    return network


@cache
def _tell(weights: Weights, missing: str) -> None:
    """Log that the last layer is missing, once per process, which makes many initial models."""
    logging.getLogger("flwr").info(
        "%s has no %s: the last layer starts from the seed", weights.file, missing
    )
