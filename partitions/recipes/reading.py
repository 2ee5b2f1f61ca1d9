"""Options for reading pictures and scans in ``silofl import``, which a recipe repeats."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from partitions.common.errors import DataError
from partitions.common.names import Names

# Centre and width of a window; mm from row to row, and from column to column; the smallest and the largest of values
Pair = tuple[float, float]
MOST_SIDE = 4096  # voxels of a volume, on a side


@dataclass(frozen=True)
class ReadOptions:
    """Read options of pictures and scans.

    * ``size``: side in pixels after resizing (None: pictures are not resized, and must have one size).
    * ``window``: centre and width, in the scan's own units; ``spacing``: mm of a pixel.
    * ``slices``: number per series or volume; ``series``: a pattern for its description.
    * ``volume``: (d, h, w) of a whole volume, instead of slices; ``voxel``: mm of its voxels along these axes, None to
      stretch it.
    * ``outlines``: names of the classes 1, 2, ... in SEG and RTSTRUCT objects.
    * ``binary_masks``: whether masks have 0 and 255 alone, and 255 is class 1.
    * ``channels``, ``rate``, ``seconds``: of signals: names of the channels in order, Hz, and the length.
    """

    size: int | None = None
    window: Pair | None = None
    spacing: float | None = None
    slices: int = 1
    series: str = ""
    volume: tuple[int, int, int] | None = None
    voxel: tuple[float, float, float] | None = None
    outlines: Names = ()
    binary_masks: bool = False
    channels: Names = ()
    rate: float | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        for name in ("size", "slices"):
            if (number := getattr(self, name)) is not None and number < 1:
                raise DataError(f"{name} is {number}; it must be 1 or more")
        positive = {name: getattr(self, name) for name in ("spacing", "rate", "seconds")}
        for name, value in {
            "the window's width": self.window and self.window[1],
            **positive,
        }.items():
            if value is not None and not 0 < value < np.inf:
                raise DataError(f"{name} is {value:g}; it must be above 0")
        channels = {name.casefold() for name in self.channels}
        if len(channels) < len(self.channels):
            raise DataError("--channels names one twice")
        if self.volume is None:
            if self.voxel or self.outlines:
                raise DataError(
                    "voxels of three sizes and --outlines are of volumes: say --volume D,H,W"
                )
            return
        if self.size or self.spacing or self.slices > 1:
            raise DataError(
                "--size and --slices are of single slices: --volume D,H,W takes whole volumes"
            )
        if not all(0 < side <= MOST_SIDE for side in self.volume):
            raise DataError(f"a volume has 1 to {MOST_SIDE} voxels on a side")
        if self.voxel and not all(0 < side < np.inf for side in self.voxel):
            raise DataError("spacing is the mm of a voxel, above 0")
        outlines = {name.removesuffix("?").casefold() for name in self.outlines}
        if len(outlines) < len(self.outlines):
            raise DataError("--outlines names one twice")


@dataclass(frozen=True)
class Acquisition:
    """The properties of a picture's acquisition in the header that other pictures must share.

    * ``format``: picture, dicom or nifti, or that of a signal; ``modality``: DICOM's code.
    * ``plane``: axial, coronal, sagittal, or "" where it is not stated.
    * ``photometric``: DICOM's interpretation; ``rescaled``: whether values are in a unit of the machine, by slope and
      intercept or a table.
    * ``pixel``: mm of a pixel's smaller side, None where it is not stated; ``between``: mm between slices of a volume.
    * ``rate``: Hz of a signal, before it is resampled; ``channels``, ``units``: names and units of its channels.
    """

    format: str = "picture"
    modality: str = ""
    plane: str = ""
    photometric: str = ""
    rescaled: bool = False
    pixel: float | None = None
    between: float | None = None
    rate: float | None = None
    channels: Names = ()
    units: Names = ()
