"""Division of imported samples into train, val and test, patient by patient."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from partitions.common.errors import DataError
from partitions.common.names import Names
from partitions.importing.readers.reader import Samples
from partitions.importing.targets import Answers
from partitions.labels import ONE_CLASS
from partitions.recipes.draft import FEWEST
from partitions.recipes.recipe import Recipe
from partitions.recipes.values import far_values
from partitions.schema import few
from partitions.schemes.pool import share_of
from partitions.site_split import TEST_SHARE, VAL_SHARE, VAL_SHARE_OF_TRAIN
from partitions.splits import SPLITS, Array

if TYPE_CHECKING:
    from pandas import DataFrame

FEWEST_DIVIDED = 3  # patients; fewer would leave a part without one

# No class
UNKNOWN = (
    "unknown",
    "unbekannt",
    "missing",
    "none",
    "not known",
    "n.a.",
    "inconnu",
    "desconocido",
)


def number_patients(samples: Samples) -> Array:
    """Number the samples' patients, int64 (n,), in order of appearance. A sample without one gets its own number."""
    number: dict[Any, int] = {}
    whose = (sample.patient or i for i, sample in enumerate(samples))
    numbers = (number.setdefault(patient, len(number)) for patient in whose)
    return np.fromiter(numbers, np.int64, len(samples))


def patient_notes(samples: Samples, column: str | None) -> Names:
    """Return notes on samples that name no patient, and on patients whose identifier is written in several ways."""
    spellings = defaultdict[str, dict[str, str]](dict)
    for sample in samples:
        spellings[sample.patient].setdefault(sample.spelling, sample.where)
    spellings.pop("", None)
    notes = []
    if several := [[*written.values()] for written in spellings.values() if len(written) > 1]:
        first, second = several[0][:2]
        notes.append(
            f"{len(several)} of {len(spellings)} patients are written in several ways, such as 7, 007, 7.0 or p7, P7, "
            f"first in {first} and {second.rpartition(', ')[2]}: each is taken as one patient"
        )
    without = sum(not sample.patient for sample in samples)
    if without and not (without == len(samples) and column is None):
        notes.append(
            f"{without} of {len(samples)} samples name no patient: each is taken for another patient's (--patient)"
        )
    return tuple(notes)


def label_notes(task: str, answers: Answers, patients: Array, places: Array) -> Iterator[str]:
    """Yield notes on parts that lack a class, on classes that may be none, and on patients of several."""
    yield from missing_notes(
        answers.present, answers.names or ("events",) * (task == "survival"), places
    )
    measured = answers.y.T.astype(float) if task in ("regression", "survival") else ()
    for name, column in zip(answers.names or ("time",), measured, strict=False):
        for row, remark in far_values(column):
            many = remark.format(f"{column[row]:g}")
            yield f"{name}: {many}: if that means unknown, drop such rows"
    if task not in ONE_CLASS:
        return
    counts = np.bincount(answers.y, minlength=len(answers.names))
    for count, name in zip(counts.tolist(), answers.names, strict=False):
        if name.casefold() in UNKNOWN:
            yield f"{count} samples are of class {name!r}: if that means that they have no label, drop them"
    pairs = np.unique(np.stack([patients, answers.y]), axis=1)[0]
    if several := int((np.unique(pairs, return_counts=True)[1] > 1).sum()):
        yield f"{several} of {len(np.unique(patients))} patients have samples of several classes"


def check_class_names(names: Sequence[str], y: Array, patients: Array) -> None:
    """Raise DataError where a class that was found, not declared, has a name of few patients, which may be a person's.

    Names of classes leave with the data summary, as those of columns do.
    """
    counts = np.bincount(np.unique(np.stack([y, patients]), axis=1)[0], minlength=len(names))
    if rare := [
        repr(name) for name, count in zip(names, counts.tolist(), strict=True) if count < FEWEST
    ]:
        raise DataError(
            f"names of classes leave the hospital, and fewer than {FEWEST} patients have {few(rare, 4)}: correct them, "
            "or name every class of the federation, in order, with --labels A,B (`classes` in a recipe)"
        )


def rare_notes(table: DataFrame, recipe: Recipe, patients: Array) -> Names:
    """Return notes on categories of few patients. ``table``: from ``recipes.pipeline.convert_columns``."""
    rare = [
        f"{column.name}={level} ({count})"
        for j, column in enumerate(recipe.used)
        for level in (column.levels if column.kind == "category" else ())
        if 0 < (count := len(np.unique(patients[table[j] == level]))) < FEWEST
    ]
    if not rare:
        return ()
    return (
        f"of fewer than {FEWEST} patients are {few(rare, 8)}: sums of columns leave with the data summary and can tell "
        "of them; the recipe may merge them (`values`, `other`)",
    )


def assign_splits(samples: Samples, patients: Array, present: Array | None, seed: int) -> Array:
    """Return the split of each sample, text (n,): as given, or drawn by seed, patient by patient.

    ``present``: which classes each sample has, bool (n, k): patients of each class are divided by the same shares.
    """
    stated = np.array([sample.split for sample in samples])
    if stated.any() and not stated.all():
        sample = samples[int((stated == "").argmax())]
        raise DataError(
            f"{sample.where} has no split, others have; name one for every sample, or for none"
        )
    names, codes = np.unique(stated, return_inverse=True)
    if twice := len(np.unique(patients * len(names) + codes)) - len(np.unique(patients)):
        raise DataError(
            f"{twice} patients are in more than one split; put all of a patient's samples into one"
        )
    rng = np.random.default_rng(seed)
    splits = stated.astype("<U5") if stated.any() else np.full(len(samples), "train", "<U5")
    strata = strata_of(patients, present)
    if not stated.any():
        held = held_out(np.arange(len(strata)), strata, TEST_SHARE, rng)
        splits[np.isin(patients, held)] = "test"
    if "val" not in splits:
        share = VAL_SHARE_OF_TRAIN if stated.any() else VAL_SHARE
        held = held_out(np.unique(patients[splits == "train"]), strata, share, rng)
        splits[np.isin(patients, held) & (splits == "train")] = "val"
    return splits


def strata_of(patients: Array, present: Array | None) -> Array:
    """Return each patient's rarest class, the number of all classes for one without any, int64 (patients,)."""
    count = int(patients.max()) + 1
    if present is None:
        return np.zeros(count, np.int64)
    has = np.stack([np.bincount(patients, column, count) > 0 for column in present.T], axis=1)
    rarest = np.argsort(has.sum(axis=0), kind="stable")
    return np.asarray(
        np.where(has.any(axis=1), rarest[has[:, rarest].argmax(axis=1)], present.shape[1])
    )


def held_out(people: Array, strata: Array, share: float, rng: np.random.Generator) -> Array:
    """Draw the ``share`` of patients to hold out, rounded up: the same share of each stratum, to a whole patient.

    ``strata``: of all patients; of one with patients enough for all three parts one at least is held out.
    """
    drawn, stratum = rng.permutation(people), strata[people]
    wanted = min(share_of(len(people), share), max(len(people) - 1, 0))
    names, sizes = np.unique(stratum, return_counts=True)
    exact = sizes * wanted / max(len(people), 1)
    enough = (sizes > 1) & (np.bincount(strata)[names] >= FEWEST_DIVIDED) & (len(names) > 1)
    counts = np.maximum(np.floor(exact).astype(int), enough)
    for k in np.argsort(counts - exact, kind="stable")[: max(wanted - counts.sum(), 0)]:
        counts[k] += 1
    groups = [drawn[strata[drawn] == name] for name in names]
    return np.concatenate([group[:count] for group, count in zip(groups, counts, strict=True)])


def missing_notes(present: Array | None, names: Sequence[str], places: Array) -> Iterator[str]:
    """Yield a note for each part of samples that lacks a class, finding or event that others have."""
    if present is None:
        return
    for part in SPLITS:
        chosen = places == part
        lacks = present.any(axis=0) & ~present[chosen].any(axis=0)
        if chosen.any() and lacks.any():
            named = few(
                [names[k] if names else f"{k}" for k in np.flatnonzero(lacks).tolist()], 8
            )
            yield f"no sample of the {part} part has {named}: too few patients have it, or the given split lacks it"
