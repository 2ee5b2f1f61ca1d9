"""A class for every pixel or voxel."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from models.intervals import of_share
from models.samples import Samples
from models.tasks.base import ENDS, SingleLossTask
from models.training import Loss, Network, by_batch

VOID = 255  # the label of an ignored pixel
SLAB = 2**24  # most outputs of a batch that a metric takes at once


def pixel_losses(outputs: Tensor, y: Tensor) -> Tensor:
    """Return the loss of each sample (b,): mean cross-entropy of its pixels + 1 - mean soft Dice of the foreground.

    outputs (b, C, ...), y (b, ...) with classes 0..C-1, 0 the background; pixels of 255 are ignored. Soft Dice of a
    class is (2 sum p g + 1) / (sum p + sum g + 1), with p the softmax, and g 1 for pixels of the class, else 0.
    """
    return loss_of_sums(*pixel_sums(outputs, y))


def pixel_sums(outputs: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Return sums over pixels: of cross-entropies and pixels (b,), of p g, p and g (b, C - 1)."""
    counts = y != VOID
    spatial = tuple(range(1, y.dim()))
    cross = F.cross_entropy(outputs, y, reduction="none", ignore_index=VOID).sum(spatial)
    p = torch.softmax(outputs, 1)[:, 1:] * counts.unsqueeze(1)
    g = torch.stack([y == c for c in range(1, outputs.shape[1])], 1).to(p.dtype)
    across = tuple(range(2, p.dim()))
    return cross, counts.sum(spatial), (p * g).sum(across), p.sum(across), g.sum(across)


def loss_of_sums(cross: Tensor, counts: Tensor, both: Tensor, p: Tensor, g: Tensor) -> Tensor:
    dice = (2 * both + 1) / (p + g + 1)
    return cross / counts.clamp(min=1) + 1 - dice.mean(1)


def overlaps(outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return |A and B| and |A| + |B| of each foreground class (b, C - 1), A the predicted pixels, B the true ones."""
    predicted = outputs.argmax(1).masked_fill(y == VOID, VOID)
    both, total = [], []
    for c in range(1, outputs.shape[1]):
        a, b = (predicted == c).flatten(1), (y == c).flatten(1)
        both.append((a & b).sum(1))
        total.append(a.sum(1) + b.sum(1))
    return torch.stack(both, 1), torch.stack(total, 1)


def in_slabs(outputs: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield outputs and labels in slabs along the first side, of about SLAB outputs each."""
    depth = max(1, SLAB * y.shape[1] // max(1, outputs.numel()))
    yield from zip(torch.split(outputs, depth, 2), torch.split(y, depth, 1), strict=True)


def labelled(outputs: Tensor, y: Tensor, unlabelled: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return outputs (b, C', ...) and masks (b, ...) of the labelled classes alone, renumbered from 0.

    Nothing is computed from the other outputs, so that their gradient is exactly 0, and the softmax is over the rest.
    What such an output should be is not known here: its class is part of this hospital's background.
    """
    if not unlabelled:
        return outputs, y
    kept = [outputs[:, c] for c in range(outputs.shape[1]) if c not in unlabelled]
    below = torch.stack([y > c for c in unlabelled]).sum(0).to(y.dtype)
    return torch.stack(kept, 1), torch.where(y == VOID, y, y - below)


@dataclass(frozen=True)
class LabelledLoss:
    """A loss of the labelled classes alone."""

    loss: Loss
    unlabelled: tuple[int, ...]

    def __call__(self, outputs: Tensor, y: Tensor) -> Tensor:
        return self.loss(*labelled(outputs, y, self.unlabelled))


def segmentation_loss(outputs: Tensor, y: Tensor) -> Tensor:
    """Return the mean of :func:`pixel_losses` over a batch."""
    return pixel_losses(outputs, y).mean()


@dataclass(frozen=True)
class Segmentation(SingleLossTask):
    """Outlines: a class for every pixel. The score is per picture, without the background, which would raise it.

    ``unlabelled``: the classes that a hospital does not outline; loss and metrics are of the others.
    """

    unlabelled: tuple[int, ...] = ()

    name = "segmentation"
    metrics = ("loss", "dice", *ENDS)
    score = "dice"
    score_label = "Dice"
    minimum_outputs = 2
    per_pixel = True
    own_loss = staticmethod(segmentation_loss)
    BATCH: ClassVar[int] = 16

    def loss(
        self, name: str, gamma: float, smoothing: float = 0.0, weights: Tensor | None = None
    ) -> Loss:
        whole = super().loss(name, gamma, smoothing, weights)
        return LabelledLoss(whole, self.unlabelled) if self.unlabelled else whole

    def measure(self, outputs: Tensor, y: Tensor) -> dict[str, float]:
        """Return ``loss``, ``dice`` and the ends of its interval.

        ``dice`` is the mean over pictures of the mean over foreground classes of 2 |A and B| / (|A| + |B|). A class in
        neither picture nor prediction is left out (nan where none is left); a class in only one of them has 0.
        """
        return self._summary([self._each(outputs, y)])

    def evaluate(self, model: Network, samples: Samples) -> dict[str, float]:
        return self._summary(by_batch(model, samples, self.BATCH, self._each))

    def dice_by_case(self, model: Network, samples: Samples) -> Tensor:
        """Return the Dice (n,) of each picture; ``nan`` where neither picture nor prediction has any foreground."""
        return torch.cat(
            [dice for _, dice in by_batch(model, samples, self.BATCH, self._each)]
            or [torch.empty(0)]
        )

    def _each(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return loss (n,) and Dice (n,) of each picture."""
        each = [
            (*pixel_sums(slab.double(), part.long()), *overlaps(slab, part))
            for slab, part in in_slabs(*labelled(outputs.detach(), y, self.unlabelled))
        ]
        *sums, both, total = (torch.stack(slab).sum(0) for slab in zip(*each, strict=True))
        dice = torch.where(total > 0, 2 * both / total.double(), torch.nan)
        return loss_of_sums(*sums).cpu(), dice.nanmean(1).cpu()

    def _summary(self, each: Sequence[tuple[Tensor, Tensor]]) -> dict[str, float]:
        losses, dice = (
            (torch.cat(parts) for parts in zip(*each, strict=True))
            if each
            else (torch.empty(0),) * 2
        )
        known = dice[~dice.isnan()].double()
        mean = float(known.mean()) if len(known) else math.nan
        variance = float(known.var()) / len(known) if len(known) > 1 else 0.0
        ends = of_share(mean, variance, len(known))
        loss = float(losses.mean()) if len(losses) else math.nan
        return {"loss": loss, "dice": mean, **dict(zip(ENDS, ends, strict=True))}

    def answers(self, outputs: Tensor) -> tuple[list[str], list[list[float]]]:
        """Return the number of pixels of each class; the masks themselves go into a file."""
        predicted = outputs.argmax(1).flatten(1)
        names = [f"pixels_{c}" for c in range(outputs.shape[1])]
        return names, [torch.bincount(row, minlength=len(names)).tolist() for row in predicted]
