"""Augmentation of training pictures, drawn anew in every epoch: ``augment = "flip,rotate:10,shift:2"``.

| change | effect on a picture |
|---|---|
| ``flip``, ``flip-vertical`` | mirrored left to right, or top to bottom, with probability 1/2 |
| ``crop:P`` | shifted by up to P whole pixels down or up and left or right, like a crop of a picture padded by P |
| ``shift:P`` | shifted by up to P pixels each way, fractions included |
| ``rotate:D`` | rotated about its centre by up to D degrees, either way |
| ``scale:S`` | enlarged or reduced about its centre, by a factor between 1 - S and 1 + S |
| ``perspective:S`` | with probability 1/2 a perspective view: each corner moved inwards by up to S of half a side |
| ``contrast:S`` | distances from its mean multiplied by a factor between 1 - S and 1 + S |
| ``brightness:S`` | a value added to all pixels, of up to S of the difference between its largest and smallest value |

All draws are uniform. Flip, rotation and scale, shift and perspective (in this order) are one map and one bilinear
interpolation, whatever the number of changes. Pixels from outside are filled by reflection at the edge, because the
value of black in a hospital's file is unknown. Masks move with their pictures (nearest neighbour). All slices of a
volume get the same change, in their plane.

The draws depend on seed, silo, round, purpose and epoch only. They come from a separate generator on the CPU. So the
order of the samples and dropout do not change, and CPU, GPU and deployed silos draw the same numbers.

Augmentation applies to the batches that a method trains a model on (``SiloClient.batches``). It applies neither to
evaluation nor to other measurements: ALA's weights, PLayer-FL's sensitivity, FedFomo's losses, FedPAC's prototypes and
statistics, full gradients (SCAFFOLD's option I, FedAPM's accuracy). FedProto's prototypes are means over the augmented
batches, and with ``features = "trained"`` over the samples without augmentation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from models.shapes import Shape, inputs_of, kind_of
from partitions.common.errors import UserError

COLUMNS = 19  # numbers drawn for each picture, always all: each change uses fixed columns
# Of a picture, in half sides, x before y
CORNERS = ((-1.0, -1.0), (1.0, -1.0), (1.0, 1.0), (-1.0, 1.0))
PLACE = ("flip", "flip_vertical", "crop", "shift", "rotate", "scale", "perspective")
# The largest strengths; those in pixels are limited by the picture. A perspective from about 0.47 can show its horizon.
MOST = {"rotate": 180.0, "scale": 0.5, "perspective": 0.4, "contrast": 1.0, "brightness": 1.0}
FORM = "'flip,shift:2,rotate:10,brightness:0.1' for example"


@dataclass(frozen=True)
class Augmentation:
    """Strength of each augmentation; 0: none."""

    flip: float = 0.0
    flip_vertical: float = 0.0
    crop: float = 0.0
    shift: float = 0.0
    rotate: float = 0.0
    scale: float = 0.0
    perspective: float = 0.0
    contrast: float = 0.0
    brightness: float = 0.0

    def check(self, shape: Shape) -> None:
        """Raise UserError, in one line, where samples of this shape cannot be augmented so."""
        pictures = [
            part for part in inputs_of(shape).values() if kind_of(part) in ("picture", "volume")
        ]
        if not pictures:
            raise UserError(
                "augment changes pictures: for tables, texts and signals leave it empty"
            )
        for name, pixels in (("crop", self.crop), ("shift", self.shift)):
            for *_, height, width in pictures:
                if pixels >= min(height, width):
                    raise UserError(
                        f"augment = {name}:{pixels:g} moves pictures of {height} x {width} out of sight"
                    )

    def change_batches(
        self, batches: Iterable[tuple[Any, Tensor]], n: int, rng: torch.Generator
    ) -> Iterator[tuple[Any, Tensor]]:
        """Yield the batches (x, y) of one epoch of n samples, each sample with its own changes.

        Of several inputs only pictures are changed; all pictures of one sample get the same changes.
        """
        drawn = torch.rand(n, COLUMNS, generator=rng)
        done = 0
        light = torch.empty(0)
        maps: dict[str, Tensor] = {}
        for x, y in batches:
            alone = isinstance(x, Tensor)
            pictures = (
                {"": x}
                if alone
                else {name: input_ for name, input_ in x._asdict().items() if input_.dim() > 3}
            )
            if not done:  # the maps of the whole epoch, in one copy to the device
                light = drawn[:, 17:].to(y.device)
                maps = {
                    name: self._maps(drawn, *p.shape[-2:]).to(y.device)
                    for name, p in pictures.items()
                }
            part, done = slice(done, done + len(y)), done + len(y)
            for name, picture in pictures.items():
                if any(getattr(self, change) for change in PLACE):
                    picture, y = warp(picture, y, maps[name][part])
                pictures[name] = self._lit(picture, light[part])
            yield pictures[""] if alone else x._replace(**pictures), y

    def _maps(self, drawn: Tensor, height: int, width: int) -> Tensor:
        """Return for each picture the map (n, 3, 3) from a pixel of the changed picture to its source.

        Coordinates are pixels from the centre, x before y. The map is the inverse of the changes, the last one first.
        """
        d = drawn.double()
        either = 2 * d - 1  # -1..1
        matrices = torch.eye(3, dtype=torch.float64).repeat(len(d), 1, 1)
        mirror, turn, move = matrices.clone(), matrices.clone(), matrices.clone()
        mirror[:, 0, 0] = torch.where((d[:, 0] < 0.5) & bool(self.flip), -1.0, 1.0)
        mirror[:, 1, 1] = torch.where((d[:, 1] < 0.5) & bool(self.flip_vertical), -1.0, 1.0)
        angle = either[:, 4] * math.radians(self.rotate)
        factor = 1 + either[:, 7] * self.scale
        turn[:, 0, 0] = turn[:, 1, 1] = angle.cos() / factor
        turn[:, 0, 1], turn[:, 1, 0] = angle.sin() / factor, -angle.sin() / factor
        whole = (d[:, 2:4] * (2 * self.crop + 1)).floor().clamp(max=2 * self.crop) - self.crop
        move[:, :2, 2] = -(whole + either[:, 5:7] * self.shift)
        maps = mirror @ turn @ move
        if self.perspective:
            half = torch.tensor([width / 2, height / 2], dtype=torch.float64)
            corners = torch.tensor(CORNERS, dtype=torch.float64)
            ends = corners * (1 - self.perspective * d[:, 9:17].view(-1, 4, 2))
            slanted = projections(ends * half, corners * half)
            maps = torch.where((d[:, 8] < 0.5)[:, None, None], maps @ slanted, maps)
        return maps.float()

    def _lit(self, x: Tensor, light: Tensor) -> Tensor:
        """Change contrast and brightness of pictures (b, ...) by the draws ``light`` (b, 2) in 0..1."""
        dimensions = tuple(range(1, x.dim()))
        contrast, brightness = (2 * light - 1).view(len(x), 2, *[1] * len(dimensions)).unbind(1)
        if self.contrast:
            mean = x.mean(dimensions, keepdim=True)
            x = mean + (x - mean) * (1 + self.contrast * contrast)
        if self.brightness:
            span = x.amax(dimensions, keepdim=True) - x.amin(dimensions, keepdim=True)
            x = x + span * (self.brightness * brightness)
        return x


def read_augmentation(text: str) -> Augmentation | None:
    """Parse the setting ``augment``: changes separated by commas, each as ``name:strength``; None where it is empty.

    Raises UserError, in one line, for an unknown change, a missing or repeated one, or a strength out of range.
    """
    known = [f.name.replace("_", "-") for f in fields(Augmentation)]
    amounts = dict[str, float]()
    for part in (part.strip() for part in text.split(",") if part.strip()):
        name, colon, strength = part.partition(":")
        if name not in known:
            raise UserError(
                f"augment: unknown change {name[:80]!r}; there are: {', '.join(known)}"
            )
        if name in amounts:
            raise UserError(f"augment names {name} twice")
        if name.startswith("flip"):
            if colon:
                raise UserError(f"augment: {name} has no strength: write {name}")
            amounts[name] = 1.0
            continue
        try:
            value = float(strength)
        except ValueError:
            value = math.nan
        most = MOST.get(name, 10_000)
        if not 0 < value <= most or (name == "crop" and not value.is_integer()):
            kind = "a whole number" if name == "crop" else "a number"
            wanted = f"{kind} above 0, at most {most:g}, is needed there"
            raise UserError(f"augment: {name}{colon}{strength[:80]}: {wanted}, as in {FORM}")
        amounts[name] = value
    return (
        Augmentation(**{name.replace("-", "_"): value for name, value in amounts.items()})
        if amounts
        else None
    )


def projections(start: Tensor, end: Tensor) -> Tensor:
    """Return the projective maps (n, 3, 3) from the four points ``start`` (n, 4, 2) to ``end`` (4, 2)."""
    x, y = start.unbind(-1)
    u, v = end.expand_as(start).unbind(-1)
    zero, ones = torch.zeros_like(x), torch.ones_like(x)
    rows = [
        torch.stack([x, y, ones, zero, zero, zero, -u * x, -u * y], -1),
        torch.stack([zero, zero, zero, x, y, ones, -v * x, -v * y], -1),
    ]
    solved = torch.linalg.solve(torch.cat(rows, 1), torch.cat([u, v], 1))
    return torch.cat([solved, ones[:, :1]], 1).view(-1, 3, 3)


def warp(x: Tensor, y: Tensor, maps: Tensor) -> tuple[Tensor, Tensor]:
    """Apply maps (b, 3, 3) to pictures (b, c, h, w) or volumes (b, c, d, h, w), and to masks (b, [d,] h, w).

    Labels of another form are returned unchanged.
    """
    height, width = x.shape[-2:]
    rows, columns = (torch.arange(n, device=x.device) - (n - 1) / 2 for n in (height, width))
    target = torch.stack(
        [
            *torch.meshgrid(columns, rows, indexing="xy"),
            torch.ones(height, width, device=x.device),
        ]
    )
    source = maps @ target.flatten(1)  # (b, 3, h w)
    size = source.new_tensor([width / 2, height / 2])
    grid = (source[:, :2] / source[:, 2:]).mT.reshape(-1, height, width, 2) / size

    def sample(values: Tensor, mode: str) -> Tensor:
        planes = values.reshape(len(values), -1, height, width)
        return F.grid_sample(planes, grid, mode, "reflection", align_corners=False).view(
            values.shape
        )

    if y.dim() == x.dim() - 1:
        y = sample(y.float(), "nearest").to(y.dtype)
    return torch.empty_like(x).copy_(sample(x, "bilinear")), y  # in the memory format of ``x``
