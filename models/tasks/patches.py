"""Patches of volumes and pictures that are too large for a network: random ones in training, a window in evaluation.

An epoch has ``patches-per-volume`` passes over the training samples; each pass takes one patch of each. With the
probability ``foreground-share`` its middle is a pixel of the foreground, drawn evenly, and else it is any patch. In
evaluation and prediction a window of the patch's size slides over the whole sample by half of its sides, and outputs
are averaged with Gaussian weights (MONAI's ``sliding_window_inference``). So a Dice is that of a whole volume.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from partitions.common.errors import UserError

OVERLAP = 0.5  # of neighbouring windows, along each side
VALUES = 2**21  # most values of the windows that a network sees at once
VOID = 255


@dataclass(frozen=True)
class Window:
    """A window of ``sides`` that slides over samples."""

    sides: tuple[int, ...]

    def __call__(self, module: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return the outputs (b, classes, ...) of whole samples x (b, c, ...)."""
        slide = sliding_window()
        at_once = max(1, VALUES // (x.shape[1] * math.prod(self.sides)))
        outputs: Tensor = slide(
            x, self.sides, at_once, module, overlap=OVERLAP, mode="gaussian"
        )
        return outputs


def sliding_window() -> Any:
    """Return MONAI's function. Raises UserError where MONAI is not installed."""
    try:
        # Its imports warn of other packages
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from monai.inferers import sliding_window_inference
    except ImportError:
        raise UserError(
            "patch needs MONAI, which is not installed here: pip install 'silofl[monai]'"
        ) from None
    return sliding_window_inference


@dataclass(frozen=True)
class Patches:
    """Patches of ``sides``; ``passes``: of an epoch; ``foreground``: the share about a pixel of the foreground."""

    sides: tuple[int, ...]
    passes: int
    foreground: float

    def check(self, shape: tuple[Any, ...]) -> None:
        """Raise UserError where samples of this shape (c, [d,] h, w) have no such patches."""
        text = ",".join(map(str, self.sides))
        if len(shape) != len(self.sides) + 1 or not all(isinstance(n, int) for n in shape):
            raise UserError(
                f"patch = {text}: samples of shape {shape} need "
                + (
                    "d,h,w"
                    if len(shape) == 4
                    else "h,w"
                    if len(shape) == 3
                    else "none: leave it empty"
                )
            )
        if any(side > whole for side, whole in zip(self.sides, shape[1:], strict=True)):
            raise UserError(f"patch = {text}: it is larger than samples of {shape[1:]}")

    def place(
        self, whole: tuple[int, ...], mask: Callable[[], Tensor], rng: torch.Generator
    ) -> tuple[slice, ...]:
        """Return where a patch of a sample of size ``whole`` lies; ``mask()``: its mask, read only if it decides."""
        room = [n - side for n, side in zip(whole, self.sides, strict=True)]
        drawn = torch.rand(2 + len(room), generator=rng).tolist()
        starts = [int(share * (free + 1)) for share, free in zip(drawn[2:], room, strict=True)]
        middle = nth_inside(mask(), drawn[1]) if drawn[0] < self.foreground else None
        if middle is not None:
            for axis, at in enumerate(np.unravel_index(middle, whole)):
                starts[axis] = min(max(int(at) - self.sides[axis] // 2, 0), room[axis])
        return tuple(slice(i, i + side) for i, side in zip(starts, self.sides, strict=True))


def nth_inside(y: Tensor, share: float) -> int | None:
    """Return the place, in the flat mask, of the foreground's pixel at this share of them; None without foreground."""
    inside = ((y > 0) & (y != VOID)).flatten()
    count = int(inside.sum())
    if not count:
        return None
    return int(inside.nonzero()[min(int(share * count), count - 1)])


def read_sides(text: str) -> tuple[int, ...]:
    """Parse the setting ``patch``; () where it is empty. Raises UserError."""
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    if parts and (
        len(parts) not in (2, 3) or not all(p.isascii() and p.isdigit() for p in parts)
    ):
        raise UserError(
            f"patch = {text[:40]!r}: depth, height and width are needed, for example 64,96,96"
        )
    sides = tuple(map(int, parts))
    if any(side < 1 for side in sides):
        raise UserError(f"patch = {text[:40]!r}: each side is 1 or more")
    return sides
