"""Samples of one split, ready for batches on their device."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from models.shapes import batch_type
from partitions.common.memory import is_out_of_memory
from partitions.splits import inputs_of
from partitions.stored import OnDisk, sample_digests

MOST_AT_ONCE = 512  # samples in an evaluation batch

VALUES = 2**22  # most values in an evaluation batch

VOLUME_VALUES = 2**21  # most values in an evaluation batch of volumes

TIME_STEPS = 2**15  # most time steps in an evaluation batch of texts or signals

BYTE_MEAN = BYTE_STD = 127.5  # of uint8 pictures: (x / 255 - 0.5) / 0.5

Index = Tensor | slice
# Outputs of a network for whole samples, seen part by part (models/tasks/patches.py)
Window = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]
# Where a part of a sample lies: of its size, and of its mask, which is read only if it is asked for
Place = Callable[[tuple[int, ...], Callable[[], Tensor]], tuple[slice, ...]]
T = TypeVar("T")
Scale = tuple[Tensor, Tensor] | None  # mean and standard deviation
CPU = torch.device("cpu")


class Samples:
    """One split of a silo's data, ready for batches on its device.

    ``x``: pictures (n, h, w, c), volumes (n, d, h, w, c) or signals (n, t, c) of uint8, int16, float16 or float32,
    tables (n, columns) of float32, or tokens (n, t) of int32. Several inputs have a field for each.

    ``y``, by task (models/tasks/): classes int64 (n,), numbers float32 (n, k), or masks uint8 (n, [d,] h, w), which
    become int64 per batch.

    An array is kept on the device. Stored samples (``partitions/stored.py``) are read batch by batch; their batches
    equal those of the array, bit for bit.

    uint8 pictures become (x / 255 - 0.5) / 0.5 per batch (APPLE's normalisation), so that they are stored in a quarter
    of the memory; int16 and float16 become float32. Float values stay as they are, or are standardised with ``mean``
    and ``std`` (columns of all tables,), labels with those in ``labels``. Of several inputs, one that is all zeros is
    missing, and stays all zeros.
    """

    def __init__(
        self,
        x: Any,
        y: Any,
        device: torch.device | str = "cpu",
        mean: Tensor | None = None,
        std: Tensor | None = None,
        labels: tuple[Tensor | None, Tensor | None] = (None, None),
        window: Window | None = None,
    ) -> None:
        self.device, self.window = torch.device(device), window
        # What stays on disk
        self._x, self._masks = (
            None if isinstance(part, np.ndarray) else part for part in (x, y)
        )
        self._scale: Scale = (
            None if mean is None or std is None else (mean.to(device), std.to(device))
        )
        self._kept = self._inputs(_tensors(x)) if self._x is None else None
        self.at_once = most_at_once(x)
        self._length = len(y)
        if self._masks is None:
            # Numbers float32, masks uint8, classes int64
            kind = np.float32 if y.dtype.kind == "f" else np.uint8 if y.ndim > 1 else np.int64
            self._y = _tensor(y.astype(kind, copy=False)).to(self.device)
        if labels[0] is not None and labels[1] is not None:
            self._y = (self._y - labels[0].to(self.device)) / labels[1].to(self.device)

    def __len__(self) -> int:
        return self._length

    @property
    def y(self) -> Tensor:
        """The labels (n, ...), on the device. Raises TypeError for masks on disk."""
        if self._masks is not None:
            raise TypeError("masks on disk are read in batches, never all at once")
        return self._y

    @property
    def index_device(self) -> torch.device:
        """Where indices of samples belong: on the device, or on the CPU where samples are read from disk."""
        return CPU if self._kept is None else self.device

    @property
    def content(self) -> dict[str, Tensor]:
        """Everything that batches are made of, by name; of samples on disk their digests."""
        x = (
            {"x": _digests(self._x)}
            if self._kept is None
            else {f"x {i}": part for i, part in enumerate(self._kept.parts.values())}
        )
        return x | {"y": self._y if self._masks is None else _digests(self._masks)}

    def take(self, index: Index) -> tuple[Any, Tensor]:
        """Return a batch (x, y) of the samples ``index``, a tensor on ``index_device`` or a slice.

        x is float32 (b, c, [d,] h, w) or (b, c, t) in channels-last memory, float32 (b, columns), or int32 (b, t).
        Several inputs are a named tuple of these. y is (b, ...).
        """
        kept = self._kept or self._inputs(self._read(index))
        return kept.take(index if self._kept else slice(None)), self.labels(index)

    def with_inputs(self, x: Tensor) -> Samples:
        """Return the same samples with these inputs (n, columns), in memory."""
        copied = copy.copy(self)
        copied._x, copied._kept = None, _Inputs({"": x}, self.device, None)
        copied.at_once = MOST_AT_ONCE
        return copied

    def with_labels(self, y: Tensor) -> Samples:
        """Return the same samples with these labels (n, ...), on the device."""
        copied = copy.copy(self)
        copied._y = y
        return copied

    def in_order(self, size: int = 0) -> list[slice]:
        """Return the slices of all samples in their order, ``size`` in each (0: ``at_once``)."""
        size = size or self.at_once
        return [slice(i, i + size) for i in range(0, len(self), size)]

    def batches(
        self, order: Iterable[Index], draws: int | None = None
    ) -> Iterator[tuple[Any, Tensor]]:
        """Yield a batch (x, y) for each index of ``order``, as :meth:`take` does; samples on disk by a DataLoader.

        ``draws``: the seed of what a hospital's own data set draws for a sample (``partitions/own``).

        The loader has a random generator of its own: dropout draws from torch's, and would change.
        """
        if self._kept is not None:
            yield from (self.take(index) for index in order)
            return
        loader = DataLoader(
            _Reader(self if draws is None else self._with_draws(draws)),
            sampler=order,
            batch_size=None,
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator(),
        )
        for index, parts, y in loader:
            yield self._inputs(parts).take(slice(None)), self._labels(index, y)

    def cuts(
        self, order: Iterable[Tensor], place: Place, draws: int | None = None
    ) -> Iterator[tuple[Any, Tensor]]:
        """Yield a batch (x, y) of parts of samples with masks for each index of ``order``.

        ``place(whole, mask)`` returns where a sample's part lies, given its size and a function that reads its mask.
        Of samples on disk only the part is read. ``draws``: as of :meth:`batches`.
        """
        samples = self if draws is None else self._with_draws(draws)
        for index in order:
            pairs = [samples._cut(row, place) for row in index.tolist()]
            xs, ys = zip(*pairs, strict=True)
            yield torch.stack(xs), torch.stack(ys).to(self.device, non_blocking=True).long()

    def _cut(self, row: int, place: Place) -> tuple[Tensor, Tensor]:
        """Return a part of one sample, as networks take it, and of its mask."""
        masks = self._y if self._masks is None else self._masks

        def mask() -> Tensor:
            return masks[row] if isinstance(masks, Tensor) else _tensor(masks[[row]])[0]

        at = place(masks.shape[1:], mask)
        y = masks[row][at] if isinstance(masks, Tensor) else _tensor(masks.cut(row, at))
        if self._kept is None:
            parts = self._inputs({"": _tensor(self._x.cut(row, at)[None])})  # type: ignore[union-attr]
            return parts.take(slice(None))[0], y
        return _as_networks_take(self._kept.parts[""][row][at][None])[0], y

    def _with_draws(self, draws: int) -> Samples:
        copied = copy.copy(self)
        copied._x, copied._masks = (
            part.seed_draws(draws) if isinstance(part, OnDisk) else part
            for part in (self._x, self._masks)
        )
        return copied

    def labels(self, index: Index = slice(None)) -> Tensor:
        """Return labels in the types that losses take: masks as int64."""
        return self._labels(index, self._read_masks(index))

    def _labels(self, index: Index, masks: Tensor | None) -> Tensor:
        if masks is not None:
            y = masks.to(self.device, non_blocking=True)
        else:
            labels = (
                index if isinstance(index, slice) else index.to(self.device, non_blocking=True)
            )
            y = self._y[labels]
        return y.long() if y.dtype == torch.uint8 else y

    def _read(self, index: Index) -> dict[str, Tensor]:
        return _tensors(self._x[_rows(index)])  # type: ignore[index]

    def _read_masks(self, index: Index) -> Tensor | None:
        return None if self._masks is None else _tensor(self._masks[_rows(index)])

    def _inputs(self, parts: Mapping[str, Tensor]) -> _Inputs:
        return _Inputs(parts, self.device, self._scale)


class _Inputs:
    """Inputs in memory on a device, each (n, ...) in its stored form, with tables standardised."""

    def __init__(self, parts: Mapping[str, Tensor], device: torch.device, scale: Scale) -> None:
        self.parts = {name: part.to(device, non_blocking=True) for name, part in parts.items()}
        # Of each of several inputs, which samples lack it (n,), or None where none does.
        self.missing: dict[str, Tensor | None] = {}
        done = 0
        for name, part in self.parts.items():
            missing = self.missing[name] = _find_missing(part) if name else None
            is_table = part.dim() == 2 and part.is_floating_point()
            if scale is None or (name and not is_table):
                continue
            mean, std = scale  # of all tables' columns; of pictures alone, a number each
            if name:
                mean, std = (values[done : done + part.shape[1]] for values in scale)
            self.parts[name] = (part - mean) / std
            done += part.shape[1]
            if missing is not None:
                self.parts[name][missing] = 0.0

    def take(self, index: Index) -> Any:
        """Return a batch as networks take it."""
        # index_select takes a tenth of the time of indexing
        taken = {
            name: _as_networks_take(
                part[index] if isinstance(index, slice) else part.index_select(0, index)
            )
            for name, part in self.parts.items()
        }
        if "" in taken:
            return taken[""]
        for name, missing in self.missing.items():
            if missing is not None and self.parts[name].dtype == torch.uint8:
                taken[name][missing[index]] = 0.0  # other types are zeros already
        return batch_type(tuple(taken))(*taken.values())


class _Reader(Dataset[tuple[Tensor, dict[str, Tensor], Tensor | None]]):
    """What a DataLoader reads of samples on disk: a batch for an index tensor."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __getitem__(self, index: Any) -> tuple[Tensor, dict[str, Tensor], Tensor | None]:
        return index, self.samples._read(index), self.samples._read_masks(index)


def most_at_once(x: Any) -> int:
    """Return how many samples an evaluation batch has; fewer where they have many values or time steps."""
    return min(at_once(part.shape, part.dtype) for part in inputs_of(x).values())


def at_once(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    """Return how many samples (n, ...) of one input an evaluation batch has."""
    each = max(1, math.prod(shape[1:]))
    if len(shape) == 5:
        return max(1, VOLUME_VALUES // each)
    most = min(MOST_AT_ONCE, max(1, VALUES // each))
    in_time = len(shape) == 3 or (len(shape) == 2 and dtype.kind == "i")
    return min(most, max(1, TIME_STEPS // max(1, shape[1]))) if in_time else most


def halved_once(size: int, work: Callable[[int], T]) -> T:
    """Return ``work`` of a batch size; of half of it where memory runs out at that size."""
    try:
        return work(size)
    except (MemoryError, RuntimeError) as error:
        if size == 1 or not is_out_of_memory(error):
            raise
    # Here, the failed attempt's tensors are gone with its traceback.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
    return work(size // 2)


def _tensors(x: Any) -> dict[str, Tensor]:
    """Return each input by its name, as it is."""
    return {name: _tensor(part) for name, part in inputs_of(x).items()}


def _tensor(values: np.ndarray) -> Tensor:
    with warnings.catch_warnings():
        # Arrays of a data set are read-only; nothing here writes to them.
        warnings.filterwarnings("ignore", message=".*not writable.*")
        # Through a flat view: an axis of length 1 may have any stride, and grey pictures would lose channels-last.
        return torch.from_numpy(np.ascontiguousarray(values)).flatten().view(values.shape)


def _digests(stored: Any) -> Tensor:
    return torch.from_numpy(sample_digests(stored).view(np.int64))


def _rows(index: Index) -> np.ndarray | slice:
    return index if isinstance(index, slice) else index.cpu().numpy()


def _find_missing(part: Tensor) -> Tensor | None:
    """Return which samples (n,) of an input are all zeros; None where none is."""
    missing = (part == 0).flatten(1).all(1)
    return missing if bool(missing.any()) else None


def _as_networks_take(x: Tensor) -> Tensor:
    """Return a batch of one input as networks take it: uint8 scaled, channels before places."""
    if x.dtype == torch.uint8:
        x = x.float().sub_(BYTE_MEAN).div_(BYTE_STD)
    elif x.dtype in (torch.int16, torch.float16):
        x = x.float()
    return x.movedim(-1, 1) if x.dim() > 2 else x
