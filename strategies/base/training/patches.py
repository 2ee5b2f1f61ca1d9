"""The settings of patches: what a network sees in place of whole samples, and where that is not possible."""

from __future__ import annotations

from typing import Any, Protocol

from models.tasks import task_of
from models.tasks.patches import Patches, read_sides
from partitions.common.errors import UserError


class OfPatches(Protocol):
    """The common settings that patches depend on."""

    @property
    def patch(self) -> str: ...
    @property
    def patches_per_volume(self) -> int: ...
    @property
    def foreground_share(self) -> float: ...
    @property
    def dp(self) -> bool: ...
    @property
    def ala(self) -> bool: ...


def patches_of(common: OfPatches) -> Patches | None:
    """Return the patches that a network sees in place of whole samples; None: it sees these."""
    sides = read_sides(common.patch)
    if not sides:
        return None
    return Patches(sides, common.patches_per_volume, common.foreground_share)


def seen_shape(common: OfPatches, shape: Any, task: str) -> Any:
    """Return the shape of what a network sees of samples of this shape. Raises UserError if there is no such patch."""
    patches = patches_of(common)
    if patches is None:
        return shape
    if not task_of(task).per_pixel:
        raise UserError(f"patch = {common.patch}: it is of outlines, and the task is {task}")
    patches.check(shape)
    return (shape[0], *patches.sides)


def check_patches(common: OfPatches, method: str, whole_samples: str) -> None:
    """Raise UserError for patches that the method, or another setting, has no use for.

    ``whole_samples``: why the method needs whole samples; "" where it does not.
    """
    if not read_sides(common.patch):
        if common.patches_per_volume > 1:
            raise UserError(
                f"patches-per-volume = {common.patches_per_volume} is of patches: set patch, or leave it out"
            )
        return
    asked = f"patch = {common.patch}"
    if common.dp:
        raise UserError(
            f"{asked}: not with dp = true, whose noise is for gradients of whole samples"
        )
    if common.ala:
        raise UserError(
            f"{asked}: not with ala = true, whose weights are learnt on whole samples"
        )
    if whole_samples:
        raise UserError(f"{asked}: not with strategy = {method}: {whole_samples}")
