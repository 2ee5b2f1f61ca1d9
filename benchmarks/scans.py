"""Time and memory of ``silofl import`` of whole scans, against a plain loop that reads the same files once.

``python -m benchmarks.scans [ct|nifti|xray]...``: made files in the published layouts, in a temporary folder: CT series
of 512 x 512 x 200 int16, four NIfTI sequences of 240 x 240 x 155 per patient with one mask, radiographs of
2500 x 2048. The loop is pydicom's or nibabel's reading, a window, the same resampling call, ``numpy.savez``. Each is a
separate process; processor time and peak of memory are measured, libraries included.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
from PIL import Image
from pydicom import Dataset, dcmread
from pydicom.dataset import FileMetaDataset
from pydicom.uid import UID, CTImageStorage, ExplicitVRLittleEndian

from partitions.importing.readers.volumes.grid import resample

COUNT = {"ct": 8, "nifti": 6, "xray": 20}
SEQUENCES = ("t1", "t1ce", "t2", "flair")
VOLUME, SIDE = (64, 128, 128), 224
OPTIONS = {
    "ct": ["--volume", "64,128,128", "--window=40,400"],
    "nifti": ["--volume", "64,128,128"],
    "xray": ["--size", "224", "--window=2048,4096"],
}


def write_dicom(path: Path, pixels: Any, study: int, number: int, modality: str) -> None:
    """Write one slice with pixels of 0.7 mm, 1.5 mm from the next one."""
    dataset = Dataset()
    dataset.file_meta = FileMetaDataset()
    dataset.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    dataset.SOPClassUID = dataset.file_meta.MediaStorageSOPClassUID = CTImageStorage
    dataset.SOPInstanceUID = dataset.file_meta.MediaStorageSOPInstanceUID = UID(
        f"1.2.9.{study}.{number}"
    )
    dataset.PatientID, dataset.Modality, dataset.InstanceNumber = f"P{study}", modality, number
    dataset.StudyInstanceUID, dataset.SeriesInstanceUID = f"1.2.7.{study}", f"1.2.8.{study}"
    dataset.Rows, dataset.Columns = pixels.shape
    dataset.SamplesPerPixel, dataset.PhotometricInterpretation = 1, "MONOCHROME2"
    dataset.BitsAllocated, dataset.BitsStored, dataset.HighBit = 16, 16, 15
    dataset.PixelRepresentation = int(pixels.dtype.kind == "i")
    dataset.ImageOrientationPatient = [1, 0, 0, 0, 1, 0]
    dataset.ImagePositionPatient = [0, 0, 1.5 * number]
    dataset.PixelSpacing, dataset.RescaleSlope, dataset.RescaleIntercept = [0.7, 0.7], 1, 0
    dataset.PixelData = pixels.tobytes()
    dataset["PixelData"].VR = "OW"
    path.parent.mkdir(parents=True, exist_ok=True)
    dataset.save_as(path, enforce_file_format=True)


def make(kind: str, folder: Path) -> None:
    """Write files of one kind, and ``l.csv``."""
    random, lines = np.random.default_rng(0), ["patient,label"]
    noise = random.integers(0, 4096, (2500, 2048)).astype(np.uint16)
    for i in range(COUNT[kind]):
        lines.append(f"P{i},{i % 2}")
        if kind == "ct":
            for k in range(200):
                pixels = noise[k + i : k + i + 512, :512].astype(np.int16) - 1000
                write_dicom(folder / "x" / str(i) / f"IM{k:04}", pixels, i, k, "CT")
        elif kind == "xray":
            write_dicom(folder / "x" / f"{i}.dcm", np.roll(noise, i, 0), i, 1, "DX")
        else:
            lines = ["file,mask,patient"] if i == 0 else lines[:-1]
            write: Any = nibabel.Nifti1Image
            ball: Any = sum(
                (np.arange(n).reshape(s) - 70 - i) ** 2
                for n, s in zip((240, 240, 155), SHAPES, strict=True)
            )
            nibabel.save(
                write((ball < 400).astype(np.uint8), np.eye(4)), folder / f"{i}_seg.nii.gz"
            )
            for number, name in enumerate(SEQUENCES):
                values = np.where(
                    ball < 75**2, noise[:240, :240, None] // (16 + number), 0
                ).astype(np.int16)
                nibabel.save(write(values, np.eye(4)), folder / f"{i}_{name}.nii.gz")
                lines.append(f"{i}_{name}.nii.gz,{i}_seg.nii.gz,P{i}")
    (folder / "l.csv").write_text("\n".join(lines) + "\n")


SHAPES = ((-1, 1, 1), (1, -1, 1), (1, 1, -1))


def plain(kind: str, name: str) -> None:
    """Run the plain loop."""
    folder, made = Path(name), []
    for i in range(COUNT[kind]):
        if kind == "ct":
            slices = [dcmread(path) for path in sorted((folder / "x" / str(i)).iterdir())]
            values = np.stack([own.pixel_array.astype(np.float32) for own in slices])
            made.append(onto(np.clip((values + 160) / 400, 0, 1)))
        elif kind == "xray":
            shown = dcmread(folder / "x" / f"{i}.dcm").pixel_array.astype(np.float32) / 4096
            made.append(
                np.asarray(
                    Image.fromarray(shown).resize((SIDE, SIDE), Image.Resampling.BILINEAR)
                )
            )
        else:
            for name in SEQUENCES:
                image: Any = nibabel.load(folder / f"{i}_{name}.nii.gz")
                mask: Any = nibabel.load(folder / f"{i}_seg.nii.gz")
                values = np.asarray(image.dataobj, np.float32).T[:, ::-1]
                low, high = np.percentile(values, (0.5, 99.5))
                made.append(
                    onto(np.clip((values - np.float32(low)) / np.float32(high - low), 0, 1))
                )
                onto(np.asarray(mask.dataobj).T[:, ::-1], nearest=True)
    np.savez(folder / "plain.npz", x=np.stack(made))


def onto(values: Any, *, nearest: bool = False) -> Any:
    return resample(values, VOLUME, np.array(values.shape) / np.array(VOLUME), nearest=nearest)


def measured(work: str, *args: str) -> tuple[float, float]:
    """Return processor seconds and peak MiB that a process with these statements reports of itself."""
    said = "import time; print(time.process_time(), open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"
    command = [sys.executable, "-c", f"import sys; {work}; {said}", *args]
    out = subprocess.run(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    seconds, peak = out.stdout.splitlines()[-1].split()
    return float(seconds), int(peak) / 1024


def main(kinds: Sequence[str]) -> None:
    rows = []
    for kind in kinds:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            make(kind, folder)
            source = (
                [f"{name}/l.csv"]
                if kind == "nifti"
                else [f"{name}/x", "--labels-from", f"{name}/l.csv"]
            )
            floor = measured(
                "from benchmarks.scans import plain; plain(sys.argv[1], sys.argv[2])",
                kind,
                name,
            )
            command = ["import", *source, *OPTIONS[kind], "--out", f"{name}/o.npz"]
            ours = measured("from server.cli.main import main; main(sys.argv[1:])", *command)
            ratios = [f"{mine / theirs:.2f}" for mine, theirs in zip(ours, floor, strict=True)]
            rows.append([kind, *ratios, f"{ours[1]:.0f}"])
    from benchmarks.common import table  # imports PyTorch, which the loop does not need

    print(table(rows, ["files", "time over the loop's", "peak over the loop's", "peak, MiB"]))


if __name__ == "__main__":
    main(sys.argv[1:] or list(COUNT))
