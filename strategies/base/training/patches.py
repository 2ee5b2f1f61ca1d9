"""The settings of patches: what a network sees in place of whole samples, and where that is not possible."""

from __future__ import annotations

from typing import Any

from models.tasks import task_of
from models.tasks.patches import Patches, read_sides
from partitions.common.errors import UserError


def patches_of(common: Any) -> Patches | None:
    """Return the patches that a network sees in place of whole samples; None: it sees these."""
    sides = read_sides(common.patch)
    if not sides:
        return None
    return Patches(sides, common.patches_per_volume, common.foreground_share)


def seen_shape(common: Any, shape: Any, task: str) -> Any:
    """Return the shape of what a network sees of samples of this shape. Raises UserError if there is no such patch."""
    patches = patches_of(common)
    if patches is None:
        return shape
    if not task_of(task).per_pixel:
        raise UserError(f"patch = {common.patch}: it is of outlines, and the task is {task}")
    patches.check(shape)
    return (shape[0], *patches.sides)


def check_patches(common: Any, method: str, whole_samples: str) -> None:
    """Raise UserError for patches that the method, or another setting, has no use for.

    ``whole_samples``: why the method needs whole samples; "" where it does not.
    """
    if not read_sides(common.patch):
        if common.patches_per_volume > 1:
            raise UserError(
                f"patches-per-volume = {common.patches_per_volume} is of patches: set patch, or leave it out"
            )
        return
    for refused, reason in (
        (common.dp, "dp = true, whose noise is for gradients of whole samples"),
        (common.ala, "ala = true, whose weights are learnt on whole samples"),
        (whole_samples, f"strategy = {method}: {whole_samples}"),
    ):
        if refused:
            raise UserError(f"patch = {common.patch}: not with {reason}")
