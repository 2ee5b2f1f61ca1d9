"""Which samples belong to the same patient: read from a data file, kept together by every division.

A file may hold one number per sample (``patient_train`` and so on, or ``patient`` beside ``x, y``). Samples with equal
numbers are of one patient. The numbers mean nothing else, and they are renumbered when they are read. They stay in the
silo: no message to the server holds them, or how many there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from partitions.common.errors import DataError
from partitions.common.names import unknown_name
from partitions.labels import Fault, keys_by_part
from partitions.splits import Array, Dataset

PATIENT_NAMES = {"patient": "all", **{f"patient_{split}": split for split in ("train", "val", "test")}}

# What hospitals call a column of patients, in lower case without marks: a word, or a person and what tells them apart.
WORDS = {"id", "mrn", "pid", "patid", "subjid", "medicalrecordnumber", "nhsnumber", "pseudonym", "participantid"}
PERSONS = (
    *("patient", "patients", "pat", "subject", "subj", "case", "person", "participant", "individual"),
    *("patienten", "patientin", "fall", "proband", "probanden", "versicherten", "personen", "dossier"),  # German
)
KINDS = (
    *("id", "ids", "no", "nr", "num", "number", "key", "code", "uid", "name", "identifier", "pseudonym", "mrn"),
    *("nummer", "kennung", "schlüssel"),
)
WORDS |= {"patient", "patients", "subject", "person", "participant"} | {p + kind for p in PERSONS for kind in KINDS}


def names_patients(column: str) -> bool:
    """Return whether a csv's column is called as columns of patients' identifiers are."""
    return "".join(c for c in column.lower() if c.isalnum()) in WORDS


def patient_column(path: object, header: Sequence[str], asked: str | None, labels: Sequence[str]) -> str:
    """The column that tells patients apart, or "" for none.

    ``asked``: the column that the user names; "": the column ``patient`` if there is one; None: the user says that
    there is none. ``labels``: columns that are taken for something else. Raises DataError where nothing is said and
    another column looks like one of patients.
    """
    if asked is None:
        return ""
    if asked:
        if asked not in header:
            raise unknown_name(f"column of {path}", asked, header)
        if asked in labels:
            raise DataError(f"{path}: {asked} is named as the patients' column and as a label or number, too")
        return asked
    if "patient" in header:
        return "patient"
    for column in header:
        if column not in labels and names_patients(column):
            raise DataError(
                f"{path}: does {column} say whose each row is? name it with --patient {column}, or say --no-patient "
                "if each row is of another patient"
            )
    return ""


def read_patients(arrays: Mapping[str, Array], ys: Mapping[str, Array]) -> dict[str, Array]:
    """Each part's patients, int64 (n,), numbered from 0 over all parts; empty where the file names none. Raises Fault.

    ``ys``: the labels of each part of the file.
    """
    wanted = keys_by_part(arrays, PATIENT_NAMES, ys, "one patient per sample and part")
    if not wanted:
        return {}
    for part, key in wanted.items():
        found = arrays[key]
        if found.ndim != 1 or found.dtype.kind not in "iu":
            raise Fault(
                f"{key} is {found.dtype} {found.shape}",
                "save whole numbers (n,), as numpy.unique(ids, return_inverse=True)[1] makes them: no identifiers",
            )
        if len(found) != len(ys[part]):
            raise Fault(f"{key} has {len(found)} patients, {part} {len(ys[part])} samples", "save one for each sample")
    # uint64 wraps, which keeps different numbers apart
    pooled = np.concatenate([arrays[key].astype(np.int64) for key in wanted.values()])
    numbers = np.unique(pooled, return_inverse=True)[1].astype(np.int64)
    ends = np.cumsum([len(arrays[key]) for key in wanted.values()])
    parts = dict(zip(wanted, np.split(numbers, ends[:-1]), strict=True))
    several = sum(len(np.unique(part)) for part in parts.values()) - len(np.unique(numbers))
    if several:
        raise Fault(
            f"{several} patients are in more than one part", "put all of a patient's samples into one part of the file"
        )
    return parts


def describe_patients(parts: Mapping[str, Array]) -> str:
    """Describe the number of patients in each part, for the hospital alone."""
    return ", ".join(f"{part} {len(np.unique(patients))}" for part, patients in parts.items())


def patient_digests(digests: Array, patients: Array) -> Array:
    """Each sample's patient's digest, uint64 (n,): the sum of those of the patient's samples, modulo 2^64."""
    _, numbers = np.unique(patients, return_inverse=True)
    sums = np.zeros(numbers.max(initial=-1) + 1, np.uint64)
    np.add.at(sums, numbers, digests)
    return sums[numbers]


def fewest_changed(now: Counter[str], before: Counter[str]) -> int:
    """The fewest patients by whom two versions of data differ, from their digests.

    A patient whose record was corrected has one digest in each version, and counts once. So does one who left, together
    with one who came.
    """
    return max((now - before).total(), (before - now).total())


def rows_of_patients(dataset: Dataset) -> list[Array] | None:
    """The rows (train followed by test) of each patient, those of the training part first; None where none is named."""
    if dataset.train.patient is None or dataset.test.patient is None:
        return None
    rows: list[Array] = []
    for part, offset in ((dataset.train.patient, 0), (dataset.test.patient, len(dataset.train))):
        _, counts = np.unique(part, return_counts=True)
        rows += np.split(np.argsort(part, kind="stable") + offset, np.cumsum(counts)[:-1])
    return rows


def most_frequent(labels: Array, rows: Sequence[Array]) -> Array:
    """Each patient's most frequent class, the lowest of several, int64 (patients,)."""
    return np.array([np.bincount(labels[own]).argmax() for own in rows], np.int64)
