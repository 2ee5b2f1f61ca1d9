"""Initial weights from a file, whose names and shapes are checked against the network one by one.

It is a safetensors file, or one of ``torch.save``, which is read with ``weights_only``. Names are ours, or those under
which the architecture's weights are published (``ModelSpec.published``), perhaps behind a prefix. A last layer that is
missing, or has other shapes, starts from the seed. A file is identified by its SHA-256.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from models.layout import block_names, other_names
from partitions.common.errors import DataError
from partitions.common.sizes import TooLargeError, repack

SHOWN = 3  # most faults in a message
# Where a training loop's file has its tensors
STATES = ("state_dict", "model", "model_state_dict")
Published = tuple[tuple[str, str], ...]  # patterns of names, and replacements


@dataclass(frozen=True)
class Weights:
    """A file and its expected SHA-256; a file with another one is refused."""

    file: str
    sha256: str


def weights_of(file: Path) -> Weights:
    """Return the file with its present SHA-256. Raises DataError where it cannot be read."""
    try:
        status = file.stat()
        return _load_hashed(file, status.st_mtime_ns, status.st_size)
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
        # The start of a file of torch.save
        if not content.startswith(b"PK\x03\x04"):
            return safetensors.torch.load(content)
        loaded = torch.load(repack(content, "it"), map_location="cpu", weights_only=True)
        state = _state_in({str(key): value for key, value in loaded.items()})
        return {name: tensor.detach() for name, tensor in state.items()}
    except TooLargeError as error:
        raise DataError(f"init-weights = {weights.file}: {error}") from None
    except Exception as error:
        reason = " ".join(str(error).split()).partition(". ")[0]
        raise DataError(
            f"init-weights = {weights.file} is no file of tensors alone, as safetensors and torch.save write it: "
            f"{reason:.200}"
        ) from None


def _state_in(loaded: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """Return the tensors of a file of ``torch.save``: below a key of STATES, else below the only key, or all.

    Raises DataError, where several keys hold tensors, or something is no tensor.
    """
    below = {
        key: value
        for key, value in loaded.items()
        if isinstance(value, Mapping) and any(isinstance(v, Tensor) for v in value.values())
    }
    known = [key for key in STATES if key in below][:1] or [*below]
    if len(known) > 1:
        raise DataError(
            f"it holds tensors under {', '.join(sorted(known))}: save the network's alone"
        )
    where, state = (f"under {known[0]} ", below[known[0]]) if known else ("", loaded)
    if others := [str(name) for name, value in state.items() if not isinstance(value, Tensor)]:
        raise DataError(
            f"{where}{', '.join(others[:SHOWN])} is no tensor: save the state_dict alone"
        )
    return state


def our_name(name: str, published: Published) -> str:
    """Return our name of a tensor in a published file; ``published`` has patterns and replacements."""
    for pattern, replacement in published:
        name = re.sub(pattern, replacement, name)
    return name


def _stripped(
    tensors: dict[str, Tensor], known: Collection[str], published: Published
) -> dict[str, Tensor]:
    """Return the tensors without the modules around the network, which wrappers add.

    A training loop's file may hold others beside it, such as a loss: of one alone the names are known.
    """
    if _has_known(tensors, known, published) or not all("." in name for name in tensors):
        return tensors
    inside: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        around, _, rest = name.partition(".")
        inside.setdefault(around, {})[rest] = tensor
    networks = {around: _stripped(of, known, published) for around, of in inside.items()}
    fitting = [name for name, of in networks.items() if _has_known(of, known, published)]
    if len(fitting) != 1:
        return tensors
    _tell_left_out(tuple(sorted(inside.keys() - fitting)))
    return networks[fitting[0]]


def _has_known(tensors: Collection[str], known: Collection[str], published: Published) -> bool:
    return any(our_name(name, published) in known for name in tensors)


@torch.no_grad()
def start_from(network: nn.Module, weights: Weights, published: Published) -> nn.Module:
    """Load the file's weights and running statistics. Raises DataError, one line, where they do not fit.

    Counts of batches are ignored; of a tensor with several names, one is enough.
    """
    held = network.state_dict()
    wanted = {name: tensor for name, tensor in held.items() if tensor.is_floating_point()}
    sources: dict[str, Tensor] = {}
    faults = []
    tied = {pair for pair in other_names(network).items() if pair[0] in wanted}
    block = f"{block_names(network)[-1]}."
    last = {name for name in wanted if name.startswith(block)} - dict(tied).keys()
    tensors = sorted(_stripped(_tensors(weights), held, published).items())
    shapes = {our_name(name, published): tensor.shape for name, tensor in tensors}
    changed = {
        n.rpartition(".")[0] for n in last if shapes.get(n) not in (None, wanted[n].shape)
    }
    other = {name for name in last if name.rpartition(".")[0] in changed}
    for name, tensor in tensors:
        ours = our_name(name, published)
        if not tensor.is_floating_point():
            counted = ours not in held or ours.endswith("num_batches_tracked")
            if not counted and not torch.equal(tensor, held[ours]):
                faults.append(f"{name} has other integers, which this network does not take")
            continue
        if ours not in wanted:
            faults.append(f"{name} is not known")
        elif ours in sources:
            faults.append(f"{name} is there twice")
        elif ours in other:
            continue
        elif (shape := tuple(tensor.shape)) != tuple(wanted[ours].shape):
            faults.append(f"{name} is of shape {shape}, not {tuple(wanted[ours].shape)}")
        sources[ours] = tensor
    for name, first in tied:
        if name in sources and not torch.equal(
            sources[name], sources.setdefault(first, sources[name])
        ):
            faults.append(f"{name} and {first} are one tensor here, and two in the file")
    sources |= {name: sources[first] for name, first in tied if first in sources}
    missing = [name for name in wanted if name not in sources]
    if {*missing} not in (last, other):
        faults += [f"{name} is missing" for name in missing if name not in other]
    elif missing:
        _tell(weights, ", ".join(missing), "other shapes of" if other else "no")
    _refuse(weights, faults, len(wanted))
    for name, tensor in sources.items():
        wanted[name].copy_(tensor)
    return network


def _refuse(weights: Weights, faults: list[str], size: int) -> None:
    if faults:
        more = f" and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
        raise DataError(
            f"init-weights = {weights.file} does not fit this network of {size} tensors: "
            f"{'; '.join(faults[:SHOWN])}{more}"
        )


@cache
def _tell_left_out(modules: tuple[str, ...]) -> None:
    """Log once per process which modules of a training loop's file are not the network."""
    if modules:
        logging.getLogger("flwr").info(
            "init-weights: %s are beside the network, and left out", ", ".join(modules)
        )


@cache
def _tell(weights: Weights, missing: str, what: str) -> None:
    """Log once per process, which makes many initial models, that the last layer is not the file's."""
    logging.getLogger("flwr").info(
        "%s has %s %s: the last layer starts from the seed", weights.file, what, missing
    )
