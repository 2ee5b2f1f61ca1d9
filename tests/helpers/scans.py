"""DICOM and NIfTI files as a hospital has them: every field that names somebody is filled, with texts to look for."""

from __future__ import annotations

import warnings
import zipfile
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
from pydicom import Dataset
from pydicom.dataset import FileMetaDataset
from pydicom.sequence import Sequence
from pydicom.uid import UID, CTImageStorage, ExplicitVRLittleEndian

from partitions.importing.readers.reader import SampleSource

# What must not be found anywhere. Each holds a mark of its own, and every file below has all of them.
NAMED = {
    "PatientName": "Zarathustra^Wilhelmine^^Dr.",
    "PatientBirthDate": "19310417",
    "PatientBirthTime": "061523.5",
    "PatientAddress": "Quittenweg 7, 99423 Umpferstedt",
    "PatientMotherBirthName": "Xylander",
    "PatientTelephoneNumbers": "+49364477123",
    "PatientComments": "fell off the rocking horse",
    "OtherPatientIDs": "KVNR-A123456780",
    "ReferringPhysicianName": "Querulus^Anton",
    "OperatorsName": "Jakubowsky^Ute",
    "PerformingPhysicianName": "Vlckova^Jana",
    "InstitutionName": "Klinikum Umpferstedt",
    "InstitutionAddress": "Am Galgenberg 3",
    "StationName": "ROE-UMPF-3",
    "DeviceSerialNumber": "SN-77810-QX",
    "StudyDate": "20190823",
    "StudyTime": "113347.123",
    "StudyDescription": "Verlaufskontrolle Zarathustra",
    "ProtocolName": "THX_ZARATHUSTRA",
    "AdditionalPatientHistory": "lives with the Xylander family",
    "RequestingPhysician": "Ypsilanti^Eva",
}
PREFIX = "1.2.826.0.1.3680043.8.498."
PRIVATE = "private Zarathustra 19310417"


def sample_at(path: Path, part: int | None = None, where: str = "here") -> SampleSource:
    """A scan's file as a sample."""
    return SampleSource(where, (), "", "", path, part=part)


def write_dicom(
    path: Path,
    pixels: Any = None,
    *,
    patient: str = "PAT-4711-UMPF",
    study: int = 1,
    series: int = 1,
    number: int = 1,
    uid: UID = ExplicitVRLittleEndian,
    **attributes: Any,
) -> Path:
    """One picture; grey uint16 of 12 bits unless ``pixels`` and ``attributes`` say otherwise (None: leave out)."""
    pixels = (
        np.arange(24, dtype=np.uint16).reshape(4, 6) if pixels is None else np.asarray(pixels)
    )
    frames = attributes.get("NumberOfFrames")
    colour = pixels.ndim - bool(frames) == 3
    dataset = Dataset()
    dataset.file_meta = FileMetaDataset()
    dataset.file_meta.TransferSyntaxUID = uid
    dataset.SOPClassUID = dataset.file_meta.MediaStorageSOPClassUID = CTImageStorage
    instance = UID(f"{PREFIX}9{study}.{series}.{number}")
    dataset.SOPInstanceUID = dataset.file_meta.MediaStorageSOPInstanceUID = instance
    dataset.file_meta.ImplementationVersionName = "UMPF_PACS"
    bits = 8 * pixels.dtype.itemsize
    values: dict[str, Any] = {
        **NAMED,
        "PatientID": patient,
        "StudyInstanceUID": study_uid(study),
        "SeriesInstanceUID": f"{PREFIX}8{study}.{series}",
        "AccessionNumber": accession(study),
        "SeriesDescription": "Thorax Zarathustra",
        "InstanceNumber": number,
        "Modality": "CT",
        "Rows": pixels.shape[bool(frames)],
        "Columns": pixels.shape[bool(frames) + 1],
        "SamplesPerPixel": 3 if colour else 1,
        "PhotometricInterpretation": "RGB" if colour else "MONOCHROME2",
        "BitsAllocated": bits,
        "BitsStored": 12 if bits == 16 else bits,
        "HighBit": 11 if bits == 16 else bits - 1,
        "PixelRepresentation": int(pixels.dtype.kind == "i"),
        "PlanarConfiguration": 0 if colour else None,
        **attributes,
    }
    with warnings.catch_warnings(action="ignore"):  # of values that are wrong on purpose
        for keyword, value in values.items():
            if value is not None:
                setattr(dataset, keyword, value)
    block = dataset.private_block(0x0099, "UMPF PRIVATE", create=True)
    block.add_new(0x01, "LO", PRIVATE)
    block.add_new(0x02, "SQ", Sequence([named_item()]))
    dataset.RequestAttributesSequence = Sequence([named_item()])
    dataset.PixelData = pixels.tobytes() + b"\0" * (pixels.nbytes % 2)
    dataset["PixelData"].VR = "OW" if bits > 8 else "OB"
    path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings(action="ignore"):
        dataset.save_as(path, enforce_file_format=True)
    return path


def write_nifti(path: Path, values: Any, affine: Any = None) -> Path:
    """A volume whose header's texts and extensions name the patient, as converters leave them."""
    make: Any = nibabel.Nifti1Image
    image = make(np.asarray(values), np.eye(4) if affine is None else np.asarray(affine, float))
    image.header["descrip"] = b"Zarathustra^Wilhelmine 19310417"
    image.header["aux_file"] = b"PAT-4711-UMPF"
    image.header["db_name"] = b"UMPF 20190823"
    image.header["intent_name"] = b"Xylander"
    image.header.extensions.append(nibabel.nifti1.Nifti1Extension("comment", PRIVATE.encode()))
    image.header.extensions.append(nibabel.nifti1.Nifti1DicomExtension(2, named_item()))
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(image, path)
    return path


def named_item() -> Dataset:
    item = Dataset()
    item.PatientName, item.PatientID = NAMED["PatientName"], "PAT-4711-UMPF"
    return item


def study_uid(study: int) -> str:
    return f"{PREFIX}7{study}"


def accession(study: int) -> str:
    return f"ACC-UMPF-{study:04d}"


SECRETS = (
    *(
        text
        for value in NAMED.values()
        for text in value.replace("^", " ").split()
        if len(text) > 5
    ),
    *(
        "Zarathustra",
        "Wilhelmine",
        "Xylander",
        "PAT-4711",
        "UMPF",
        "ACC-",
        PREFIX,
        "19310417",
        "20190823",
    ),
)


def leaks(*texts: str, files: tuple[Path, ...] = ()) -> list[str]:
    """Which secrets are in these texts, or in what these archives unpack to, in any usual encoding."""
    whole = "\n".join(texts).lower()
    found = [secret for secret in SECRETS if secret.lower() in whole]
    for file in files:
        with zipfile.ZipFile(file) as archive:
            members = [name.encode() + archive.read(name) for name in archive.namelist()]
        content = file.read_bytes().lower() + b"".join(members).lower()
        for secret in SECRETS:
            codes = (
                secret.lower().encode(code)
                for code in ("ascii", "utf-16-le", "utf-16-be", "utf-32-le")
            )
            found += [secret] * any(code in content for code in codes)
    return found
