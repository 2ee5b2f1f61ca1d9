"""Division of imported samples into train, val and test, patient by patient."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches

import numpy as np

from partitions.common.errors import DataError
from partitions.importing.images import SampleSource
from partitions.labels import ONE_CLASS
from partitions.recipes.draft import FEWEST
from partitions.recipes.recipe import Recipe
from partitions.schema import few
from partitions.schemes.pool import hold_out
from partitions.splits import Array

TEST_SHARE, VAL_SHARE = 0.2, 0.2  # of all; of the rest

LIKE = 0.8  # least ratio of difflib for two similar names

VAL_SHARE_GIVEN = 0.15  # of the training samples, where train and test are given but val is not


def number_patients(samples: Sequence[SampleSource]) -> Array:
    """Number the samples' patients, int64 (n,), in order of appearance. A sample without one gets its own number."""
    patient = [sample.patient or f"\0{i}" for i, sample in enumerate(samples)]
    number = {name: i for i, name in enumerate(dict.fromkeys(patient))}
    return np.array([number[name] for name in patient], np.int64)


def patient_notes(samples: Sequence[SampleSource], asked: str | None) -> tuple[str, ...]:
    """Return the note on samples that name no patient."""
    without = sum(not sample.patient for sample in samples)
    if not without or (without == len(samples) and asked is None):
        return ()
    return (f"{without} of {len(samples)} samples name no patient: each is taken for another patient's (--patient)",)


def label_notes(task: str, y: Array, names: Sequence[str], patients: Array) -> Iterator[str]:
    """Yield notes on two classes ``y`` (n,) that may be one in two spellings, and on patients of several classes.

    ``names``: of the classes that had to be numbered. Only tasks with one class per sample have notes.
    """
    if task not in ONE_CLASS:
        return
    counts = np.bincount(y, minlength=len(names))
    for i, name in enumerate(names):
        others = [other for k, other in enumerate(names) if k != i and counts[k] > counts[i]]
        if 0 < counts[i] < FEWEST and (like := get_close_matches(name, others, n=1, cutoff=LIKE)):
            yield f"{counts[i]} samples are of class {name!r}: is that {like[0]!r}, written wrong?"
    pairs = np.unique(np.stack([patients, y]), axis=1)[0]
    if several := int((np.unique(pairs, return_counts=True)[1] > 1).sum()):
        yield f"{several} of {len(np.unique(patients))} patients have samples of several classes"


def rare_notes(table: Array, recipe: Recipe, patients: Array) -> tuple[str, ...]:
    """Return notes on categories of few patients. ``table``: from ``recipes.pipeline.convert``."""
    rare = []
    for j, column in enumerate(recipe.used):
        for level in column.levels if column.kind == "category" else ():
            if 0 < (count := len(np.unique(patients[table[:, j] == level]))) < FEWEST:
                rare.append(f"{column.name}={level} ({count})")
    if not rare:
        return ()
    return (
        f"of fewer than {FEWEST} patients are {few(rare, 8)}: sums of columns leave with the data summary and can tell "
        "of them; the recipe may merge them (`values`, `other`)",
    )


def assign_splits(samples: Sequence[SampleSource], patients: Array, seed: int) -> Array:
    """Return the split of each sample, text (n,): as given, or drawn by seed, patient by patient."""
    given = np.array([sample.split for sample in samples])
    if given.any() and not given.all():
        sample = samples[int(np.flatnonzero(given == "")[0])]
        raise DataError(f"{sample.where} has no split, others have; name one for every sample, or for none")
    if twice := len({*zip(patients.tolist(), given.tolist(), strict=True)}) - len(np.unique(patients)):
        raise DataError(f"{twice} patients are in more than one split; put all of a patient's samples into one")
    rng = np.random.default_rng(seed)
    splits = given.astype("<U5") if given.any() else np.full(len(samples), "train", "<U5")
    if not given.any():
        _, held = hold_out(np.unique(patients), TEST_SHARE, rng)
        splits[np.isin(patients, held)] = "test"
    if "val" not in splits:
        share = VAL_SHARE_GIVEN if given.any() else VAL_SHARE
        _, held = hold_out(np.unique(patients[splits == "train"]), share, rng)
        splits[np.isin(patients, held) & (splits == "train")] = "val"
    return splits
