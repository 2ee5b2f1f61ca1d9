"""Features: the inputs of a network's last layer block, their class means, and the embedding rows of a batch.

**Embeddings** are the features that a frozen network makes of each sample, computed once and kept. Where the head alone
is trained (``trainable = head``), all that comes before it is the same function of a sample in every epoch, round and
evaluation. So the head trains on its results, as a linear probe does: a batch is then z (b, K).

It is used only where nothing before the head changes: no augmentation, patch or dropout, samples that draw nothing at
random, float32, and a network whose output is that of its head alone. The last is measured on the first batch, in
training and in evaluation. Features are computed in batches of an evaluation's size, so that their last bits are not
those of a training batch's.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from models.flat import FlatModel
from models.samples import Samples, halved_once
from partitions.common.files import make_folder, write_atomically

FILES = 6  # kept in a silo's state directory, the newest: three splits under two networks
MOST_BYTES = 2**31  # of a split's embeddings; beyond, none are kept


@contextmanager
def seen_features(model: FlatModel) -> Iterator[list[Tensor]]:
    """Context that yields a list, to which every forward pass appends its features."""
    seen: list[Tensor] = []
    hook = model.last_block.register_forward_pre_hook(
        lambda _, inputs: seen.append(inputs[0].float())
    )
    try:
        yield seen
    finally:
        hook.remove()


@contextmanager
def rows_looked_up(model: FlatModel) -> Iterator[dict[str, list[Tensor]]]:
    """Context that yields a list per trained embedding, by its weight's name.

    Every forward pass appends the rows that the embedding looks up, one for each position of a batch.
    """
    rows_of: dict[str, list[Tensor]] = {name: [] for name in model.embeddings}
    hooks = [
        layer.register_forward_pre_hook(
            lambda _, inputs, rows=rows_of[name]: rows.append(inputs[0].flatten())
        )
        for name, layer in model.embeddings.items()
    ]
    try:
        yield rows_of
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def features_at(model: FlatModel, vector: Tensor, x: Tensor) -> Tensor:
    """Return the features (b, K) of a batch under the parameters ``vector``; running statistics do not change."""
    named = {name: buffer.clone() for name, buffer in model.module.named_buffers()}
    with seen_features(model) as seen:
        functional_call(model.module, {**named, **model.layout.unflatten(vector)}, (x,))
    return seen[-1]


@torch.no_grad()
def compute_frozen(
    model: FlatModel, tensors: Mapping[str, Tensor], x: Any
) -> tuple[Tensor, Tensor]:
    """Return features and outputs of a batch under these tensors (``Layout.unflatten``), in evaluation mode."""

    def of(x: Any) -> tuple[Tensor, Tensor]:
        with seen_features(model) as seen:
            outputs = functional_call(model.module, dict(tensors), (x,))
        return seen[-1], outputs

    model.module.eval()
    try:
        return of(x) if model.private is None else model.private.by_chunk(of, x)
    finally:
        model.module.train()


@torch.no_grad()
def features(model: FlatModel, samples: Samples, index: Tensor) -> Tensor:
    """Return the last layer block's inputs for these samples, one row each. Only for networks without randomness."""

    def read_features(size: int) -> Tensor:
        with seen_features(model) as seen:
            for x, _ in samples.batches(torch.split(index, size)):
                model.module(x)
        return torch.cat(seen)

    return halved_once(samples.at_once, read_features)


def all_features(model: FlatModel, samples: Samples) -> Tensor:
    """Return the features (n, K) of a split, in evaluation mode."""
    model.module.eval()
    z = features(model, samples, torch.arange(len(samples), device=samples.index_device))
    model.module.train()
    return z


# ---- Sums of classes -----------------------------------------------------------------------------------------------


def members(y: Tensor, classes: int) -> Tensor:
    """Return (n, C): 1 if a sample is of the class. (``one_hot`` would copy the labels from the device.)

    Of findings y (n, L): (n, 2L), whether a sample is without, and with, each of them.
    """
    if y.dim() > 1:
        return (y[:, :, None] == torch.arange(2, device=y.device)).flatten(1).float()
    return (y[:, None] == torch.arange(classes, device=y.device)).float()


def class_sums(z: Tensor, y: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Return per class the sum of the features (C, K) and the number of samples (C,)."""
    mask = members(y, classes)
    return mask.to(z).T @ z, mask.sum(0)


def means_of(sums: Tensor, counts: Tensor) -> Tensor:
    """Return mean features (C, K); 0 for a class without samples."""
    return sums / counts.clamp_min(1)[:, None]


# ---- Embeddings ----------------------------------------------------------------------------------------------------


def embeds(model: FlatModel, samples: Samples) -> bool:
    """Return whether the head alone is trained, on features (b, K) that are always the same for a sample."""
    head, layout = model.head, model.layout
    if model.is_whole or model.has_dropout or model.has_batch_norm or len(model.integers):
        return False
    if head != slice(0, layout.size) or layout.buffer_size or samples.window is not None:
        return False
    x, _ = samples.take(samples.in_order(min(8, samples.at_once))[0])
    if not isinstance(x, Tensor) or (x.dim() == 2 and x.is_floating_point()):
        return False
    seen, outputs = [], []
    with torch.no_grad():
        for training in (False, True, True):
            model.module.train(training)
            with seen_features(model) as features:
                outputs.append(model.module(x))
            seen += features
    if len(seen) != 3 or seen[0].dim() != 2:
        return False
    same = all(torch.equal(seen[0], other) for other in seen[1:])
    with torch.no_grad():
        return same and torch.equal(model.last_block(seen[0]), outputs[0])


def embedded(model: FlatModel, samples: Samples, folder: Path | None) -> Samples:
    """Return samples whose inputs are their embeddings (n, K); ``folder``: where they are kept, or None.

    A file is named by the digest of what makes them: the frozen tensors, the network's text, and the inputs as they go
    into it, standardised. One that cannot be read is made again.
    """
    if not len(samples):
        return samples
    if folder is None:
        return samples.with_inputs(all_features(model, samples))
    file = folder / f"{digest_of_embeddings(model, samples)}.npy"
    try:
        z = torch.from_numpy(np.load(file, allow_pickle=False)).to(samples.device)
        if z.dtype != torch.float32 or z.dim() != 2 or len(z) != len(samples):
            raise ValueError("it is of other samples")
        file.touch()
    except (OSError, ValueError, EOFError):
        z = all_features(model, samples)
        if z.nbytes <= MOST_BYTES:
            try:
                keep(file, z)
            except OSError as error:
                logging.getLogger("silofl").warning("embeddings are not kept: %s", error)
    return samples.with_inputs(z)


def keep(file: Path, z: Tensor) -> None:
    """Write embeddings into a folder, from which all but the newest files are removed."""
    make_folder(file.parent, 0o700)

    def write(temporary: Path) -> None:
        with temporary.open("wb") as opened:
            np.save(opened, z.cpu().numpy(), allow_pickle=False)

    write_atomically(file, write)
    newest = sorted(file.parent.glob("*.npy"), key=lambda path: path.stat().st_mtime_ns)
    for old in newest[:-FILES]:
        old.unlink(missing_ok=True)


def digest_of_embeddings(model: FlatModel, samples: Samples) -> str:
    """Return the SHA-256 of the network's text, its frozen tensors, and the inputs."""
    frozen = {
        name: tensor
        for name, tensor in model.module.state_dict().items()
        if not name.startswith(f"{model.head_name}.")
    }
    inputs = {name: part for name, part in samples.content.items() if name != "y"}
    digest = hashlib.sha256(f"{model.module}\n{model.device.type}".encode())
    for name, tensor in (*frozen.items(), *inputs.items()):
        values = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {values.dtype} {tuple(values.shape)}\n".encode())
        digest.update(values.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def accept_embeddings(model: FlatModel) -> None:
    """Let a network take embeddings (b, K) in place of inputs: they go into its head, inputs through all of it."""
    kind = type(model.module)
    if not issubclass(kind, Embedding):
        names = {"__module__": kind.__module__, "embedded_head": model.head_name}
        model.module.__class__ = type(kind.__name__, (Embedding, kind), names)


class Embedding(nn.Module):
    """A network whose inputs are no tables, so that a batch (b, K) of numbers is one of embeddings."""

    embedded_head = ""

    def forward(self, x: Any) -> Any:
        if isinstance(x, Tensor) and x.dim() == 2 and x.is_floating_point():
            return self.get_submodule(self.embedded_head)(x)
        return super().forward(x)
