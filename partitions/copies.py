"""Samples of a data file that are there more than once, and texts that share no token: notes for the hospital."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from partitions.splits import Array, SiloData, inputs_of, is_table
from partitions.stored import in_memory, sample_digests
from partitions.tokens import FIRST_WORD

KINDS = {2: "row", 3: "signal", 4: "picture", 5: "volume"}
# Values of a picture or a signal without content; 0 also of an input that is missing
BLANK = (0, 1, 255)
CHANCE = 10.0  # times as many equal pairs of rows as independent columns would have: copies
MOST_TEXTS, FEWEST_TEXTS = 1000, 10  # texts whose tokens are compared


def sample_notes(data: SiloData) -> Iterator[str]:
    """Yield notes on equal samples in several parts or of several patients, by digest, and on texts without a common
    token. Of several inputs each is compared, without its missing samples."""
    findings = data.task == "multilabel" and data.classes > 1
    if findings and ((np.asarray(data.train.y) == 1).sum(1) == 1).all():
        yield (
            "each training sample has exactly one of the labels: if they are classes, save their numbers, y.argmax(1)"
        )
    sizes = [len(part) for part in data.splits]
    units = np.arange(sum(sizes))
    if data.train.patient is not None:
        units = np.concatenate([part.units for part in data.splits if part.patient is not None])
    in_test = np.arange(len(units)) >= sizes[0] + sizes[1]
    for name in inputs_of(data.train.x):
        inputs = [inputs_of(part.x)[name] for part in data.splits if len(part)]
        x = inputs[0]
        kind = "text" if x.dtype == np.int32 else KINDS[x.ndim]
        if kind == "text" and share_no_token(x):
            yield (
                "no two texts share a token: is it a column of identifiers, or are its words not separated?"
            )
        digests = np.concatenate([*map(sample_digests, inputs)])
        empty = np.stack([np.full(x.shape[1:], value, x.dtype) for value in BLANK])
        blank = np.isin(digests, sample_digests(empty)) & bool(name or x.ndim > 2)
        if not name and len(np.unique(digests[blank])) < blank.sum():
            yield f"{blank.sum()} of {len(units)} samples are blank: a {kind} of one value; leave them out"
        present = ~blank
        again, several = in_test & present, copied(digests, units) & present
        again &= np.isin(digests, digests[present & ~in_test])
        if is_table(x):
            by_chance = chance_pairs(np.concatenate([*map(in_memory, inputs)]))
            if pairs_of(digests) <= CHANCE * by_chance + 1:
                continue
        pairs = np.stack([digests, units.astype(np.uint64)])[:, present]
        if twice := not name and pairs.shape[1] - np.unique(pairs, axis=1).shape[1]:
            yield f"{twice} of {len(units)} samples repeat a {kind} of the same patient: exported or joined twice?"
        if again.any():
            yield (
                f"{again.sum()} of {sizes[2]} test samples have a {kind} that is also in training or validation: tests "
                "are too easy by that"
            )
        if several.any():
            yield (
                f"{several.sum()} of {len(units)} samples have the same {kind} as another patient's: keep one of each, "
                "or give the copies one patient"
            )


def copied(digests: Array, units: Array) -> Array:
    """Return which samples another patient has, too, bool (n,)."""
    _, numbers = np.unique(digests, return_inverse=True)
    pairs = np.unique(np.stack([numbers, units]), axis=1)[0]
    return np.asarray(np.bincount(pairs)[numbers] > 1)


def pairs_of(digests: Array) -> int:
    """Return how many pairs of samples are equal."""
    counts = np.unique(digests, return_counts=True)[1]
    return int((counts * (counts - 1) // 2).sum())


def chance_pairs(x: Array) -> float:
    """Return how many pairs of a table's rows would be equal if its columns were independent."""
    n = len(x)
    shares = (np.unique(column, return_counts=True)[1] / n for column in x.T)
    return float(np.prod([np.square(share).sum() for share in shares])) * n * (n - 1) / 2


def share_no_token(x: Any) -> bool:
    """Return whether no two texts share a token; of many texts the first are compared."""
    words = [np.unique(row[row >= FIRST_WORD]) for row in x[:MOST_TEXTS]]
    words = [row for row in words if len(row)]
    if len(words) < FEWEST_TEXTS:
        return False
    return bool(np.unique(np.concatenate(words), return_counts=True)[1].max() == 1)
