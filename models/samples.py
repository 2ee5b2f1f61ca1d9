"""Samples of one split on their device, ready for batches."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.shapes import batch_type

VOLUME_VALUES = 2**21  # most values in an evaluation batch of volumes

TIME_STEPS = 2**15  # most time steps in an evaluation batch of texts or signals

BYTE_MEAN = BYTE_STD = 127.5  # of uint8 pictures: (x / 255 - 0.5) / 0.5


class Samples:
    """One split of a silo's data on its device, ready for batches.

    ``x``: pictures (n, h, w, c), volumes (n, d, h, w, c), signals (n, t, c) or tables (n, columns) of uint8 or float32,
    or tokens (n, t) of int32. Several inputs are a structured array (n,) with a field for each.

    ``y``, by task (models/tasks/): classes int64 (n,), numbers float32 (n, k), or masks uint8 (n, [d,] h, w), which
    become int64 per batch.

    uint8 pictures become (x / 255 - 0.5) / 0.5 per batch (APPLE's normalisation), so that they are stored in a quarter
    of the memory. Float values stay as they are, or are standardised with ``mean`` and ``std`` (columns of all
    tables,), labels with those in ``labels``. Of several inputs, one that is all zeros is missing, and stays all zeros.
    """

    def __init__(
        self,
        x: np.ndarray,
        y: np.ndarray,
        device: torch.device | str = "cpu",
        mean: Tensor | None = None,
        std: Tensor | None = None,
        labels: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> None:
        self.y = _tensor(y.astype(_kept_as(y), copy=False), device)
        if labels[0] is not None and labels[1] is not None:
            self.y = (self.y - labels[0].to(device)) / labels[1].to(device)
        scale = None if mean is None or std is None else (mean.to(device), std.to(device))
        if not x.dtype.names:
            self.x: Tensor | tuple[Tensor, ...] = _tensor(x, device)
            if scale is not None:
                self.x = (self.x - scale[0]) / scale[1]
            return
        inputs, done = [_tensor(x[name], device) for name in x.dtype.names], 0
        # Of each input (n,), or None where no sample lacks it
        self.missing = [_missing(part) for part in inputs]
        for i, (part, missing) in enumerate(zip(inputs, self.missing, strict=True)):
            if scale is not None and part.dim() == 2 and part.is_floating_point():
                own, done = slice(done, done + part.shape[1]), done + part.shape[1]
                inputs[i] = (part - scale[0][own]) / scale[1][own]
                if missing is not None:
                    inputs[i][missing] = 0.0
        self.x = batch_type(x.dtype.names)(*inputs)

    def __len__(self) -> int:
        return len(self.y)

    @property
    def at_once(self) -> int:
        """Number of samples in an evaluation batch; smaller where samples have many values or time steps."""
        inputs = (self.x,) if isinstance(self.x, Tensor) else self.x
        return min(_at_once(part) for part in inputs)

    def take(self, index: Tensor | slice) -> tuple[Any, Tensor]:
        """Return a batch (x, y) of the samples ``index``, a tensor on the device or a slice.

        x is float32 (b, c, [d,] h, w) or (b, c, t) in channels-last memory, float32 (b, columns), or int32 (b, t).
        Several inputs are a named tuple of these. y is (b, ...).
        """
        if isinstance(self.x, Tensor):
            return _as_networks_take(_rows(self.x, index)), self.labels(index)
        parts = [_as_networks_take(_rows(part, index)) for part in self.x]
        for stored, part, missing in zip(self.x, parts, self.missing, strict=True):
            # Other types are zeros already
            if missing is not None and stored.dtype == torch.uint8:
                part[missing[index]] = 0.0
        return type(self.x)(*parts), self.labels(index)

    def labels(self, index: Tensor | slice = slice(None)) -> Tensor:
        """Return labels in the types that losses take: masks as int64."""
        y = self.y[index]
        return y.long() if y.dtype == torch.uint8 else y


def _tensor(values: np.ndarray, device: torch.device | str) -> Tensor:
    # Memory-mapped arrays are read-only; nothing here writes to them
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")
        # Through a flat view: an axis of length 1 may have any stride, and grey pictures would lose channels-last.
        return (
            torch.from_numpy(np.ascontiguousarray(values))
            .flatten()
            .view(values.shape)
            .to(device)
        )


def _missing(part: Tensor) -> Tensor | None:
    """Return which samples (n,) of an input are all zeros; None where none is."""
    found = (part == 0).flatten(1).all(1)
    return found if bool(found.any()) else None


def _at_once(part: Tensor) -> int:
    if part.dim() == 5:
        return max(1, VOLUME_VALUES // math.prod(part.shape[1:]))
    in_time = part.dim() == 3 or not (part.is_floating_point() or part.dtype == torch.uint8)
    return min(512, max(1, TIME_STEPS // part.shape[1])) if in_time else 512


def _rows(part: Tensor, index: Tensor | slice) -> Tensor:
    """Return samples of one input; index_select takes a tenth of the time of indexing."""
    return part[index] if isinstance(index, slice) else part.index_select(0, index)


def _as_networks_take(x: Tensor) -> Tensor:
    """Return a batch of one input as networks take it: uint8 scaled, channels before places."""
    if x.dtype == torch.uint8:
        x = x.float().sub_(BYTE_MEAN).div_(BYTE_STD)
    return x.movedim(-1, 1) if x.dim() > 2 else x


def _kept_as(y: np.ndarray) -> type:
    """Return the stored type of labels: numbers float32, masks uint8, classes int64."""
    return np.float32 if y.dtype.kind == "f" else np.uint8 if y.ndim > 1 else np.int64
