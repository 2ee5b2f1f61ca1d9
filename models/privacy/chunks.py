"""Chunks of one shape, in which what is computed of a record does not depend on the others; random ones for a trial."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from models.flat import FlatModel
from models.privacy.layers import in_float32
from models.training import rows

CHUNK = 2**17  # input values in a chunk,
FEWEST, MOST = 16, 256  # within these limits of its records


def by_size(units: Sequence[Tensor]) -> list[Tensor]:
    """Return the records of the units of each size, (units, size), in ascending order of size."""
    sizes: dict[int, list[Tensor]] = {}
    for index in units:
        sizes.setdefault(len(index), []).append(index)
    return [torch.stack(same) for _, same in sorted(sizes.items())]


def chunk_size(x: Any, batch: int = MOST) -> int:
    """Return the number of records in a chunk of batches like this one, if a batch shall fit in it."""
    inputs = (x,) if isinstance(x, Tensor) else x
    values = max(sum(part[:1].numel() for part in inputs), 1)
    return power_of_two(max(min(CHUNK // values, MOST, batch), FEWEST))


def in_chunk(many: int, k: int) -> int:
    """Return the rows of a chunk of ``many`` units of k records.

    Of several units they are a multiple of a vector register's numbers. Otherwise the last rows of a loss are computed
    by other instructions.
    """
    return many * k if many == 1 else -(-many * k // FEWEST) * FEWEST


def padded(index: Tensor, size: int) -> Tensor:
    """Return indices (size, ...), of which those that lack are the first one's."""
    return torch.cat([index, index[:1].expand(size - len(index), *index.shape[1:])])


def by_chunk(
    of: Callable[..., tuple[Any, ...]], batch: Sequence[Any], size: int
) -> tuple[Any, ...]:
    """Return what ``of`` makes of a batch's parts, computed in chunks of one size as in :class:`Clipping`."""
    first = batch[0] if isinstance(batch[0], Tensor) else batch[0][0]
    order = torch.arange(len(first), device=first.device)
    if not len(order):
        return of(*batch)
    chunks = []
    with in_float32():
        for index in torch.split(order, size):
            result = of(*(rows(part, padded(index, size)) for part in batch))
            chunks.append([rows(part, order[: len(index)]) for part in result])
    return tuple(map(joined, zip(*chunks, strict=True)))


def joined(parts: Sequence[Any]) -> Any:
    """Return one batch of several, each of which may have several inputs."""
    if isinstance(parts[0], Tensor):
        return torch.cat(list(parts))
    return type(parts[0])(*map(joined, zip(*parts, strict=True)))


def power_of_two(number: int) -> int:
    """Return the largest power of two that is not above a number."""
    return 1 << (number.bit_length() - 1)


@contextmanager
def random_weights(model: FlatModel) -> Iterator[torch.Generator]:
    """Context in which the model has random weights and its first buffers; yields the generator, always the same."""
    rng = torch.Generator().manual_seed(0)
    kept = model.vector.clone()
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices), model.kept_buffers():
        for entry, parameter in zip(model.layout.parameters, model.parameters, strict=True):
            values = torch.randn(entry.shape, generator=rng).to(parameter.device)
            width = parameter[0].numel() if parameter.dim() > 1 else 1
            parameter.data.copy_(values / width**0.5 if width > 1 else 1 + values / 2)
        model.reset_buffers()
        try:
            yield rng
        finally:
            model.load(kept)


@contextmanager
def evaluated(module: nn.Module) -> Iterator[None]:
    """Context in which a module is in evaluation mode."""
    training = [m for m in module.modules() if m.training]
    module.eval()
    try:
        yield
    finally:
        for m in training:
            m.training = True


def random_like(batch: Any, rng: torch.Generator, count: int) -> Any:
    """Return random records like those of a batch: normal numbers, or 0 and 1 where it has integers."""
    if not isinstance(batch, Tensor):
        return type(batch)(*(random_like(part, rng, count) for part in batch))
    # In the memory format of a chunk
    records = batch[torch.zeros(count, dtype=torch.int64, device=batch.device)]
    if batch.is_floating_point():
        return records.copy_(torch.randn(records.shape, generator=rng))
    values = torch.randint(0, 2, records.shape, generator=rng)
    values.view(count, -1)[:, 0] = 1  # no text is empty
    return records.copy_(values)


def with_others(x: Any, others: Any) -> Any:
    """Return the first record of ``x`` and all but the first of ``others``."""
    if isinstance(x, Tensor):
        return torch.cat([x[:1], others[1:]])
    return type(x)(*(with_others(*pair) for pair in zip(x, others, strict=True)))
