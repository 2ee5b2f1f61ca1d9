"""Texts in a hospital's csv as tokens, alone or beside a table's numbers, and notes on them.

Messages contain no text and no word of one, because it may name a patient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from partitions.common.errors import DataError
from partitions.common.names import Names
from partitions.importing.images import Samples
from partitions.importing.tables import SEPARATORS
from partitions.recipes.cells import GROUPS
from partitions.recipes.pipeline import transform
from partitions.recipes.recipe import Recipe
from partitions.recipes.signs import Asked
from partitions.schema import few
from partitions.splits import Array
from partitions.stored import together
from partitions.tokens import BUCKETS, LENGTH, MOST_LENGTH, Hashed, encode, parse_vocabulary

if TYPE_CHECKING:
    from pandas import DataFrame

TABLE, TEXT = "columns", "text"  # names of the two inputs of a sample


@dataclass(frozen=True)
class Take(Asked):
    """Options of a table.

    * ``text``: the column of texts, "" for none.
    * ``columns``: those of numbers; if empty, all columns without a text, and none beside a text.
    * ``vocabulary``: ``hashed:BUCKETS``, or a file's path; ``length``: tokens of a text.
    * ``patient``: the column of patients (``patients.patient_column``), or ``folder``: folders below the classes are
      patients.
    * ``separator``: of cells, "" as in the first line; ``decimal``, ``thousands``: "" as in the cells.
    * ``gaps``: more cells that mean a missing value.
    """

    text: str = ""
    columns: Names = ()
    vocabulary: str = f"hashed:{BUCKETS}"
    length: int = LENGTH
    patient: str | None = ""
    separator: str = ""
    encoding: str = ""

    def __post_init__(self) -> None:
        if self.decimal not in ("", ".", ","):
            raise DataError(f"--decimal is {self.decimal[:10]!r}; it is a point or a comma")
        if self.separator not in ("", *SEPARATORS.values()):
            raise DataError(
                f"--separator is {self.separator[:10]!r}; it is ',', ';', '|' or tab"
            )
        if self.separator and self.separator == self.decimal:
            raise DataError(
                "--separator and --decimal are both a comma; save the csv separated by semicolons"
            )
        if self.thousands not in GROUPS:
            raise DataError(
                f"--thousands is {self.thousands[:10]!r}; it is one of {', '.join(map(repr, GROUPS[1:]))}"
            )
        if self.thousands and self.thousands == self.decimal:
            raise DataError(f"--thousands and --decimal are both {self.decimal!r}")
        if not 1 <= self.length <= MOST_LENGTH:
            raise DataError(f"a text has 1 to {MOST_LENGTH} tokens, not {self.length}")


ALL_COLUMNS = Take()


def read_inputs(rows: Samples, values: Array, take: Take) -> tuple[Array, int, Names]:
    """Return the inputs of a table's rows, the size of the vocabulary (0 without texts), and notes.

    ``values``: the columns' numbers, float32 (n, columns), without columns where the text is the only input.

    Raises DataError for a row without a word, where the text is the only input.
    """
    if not take.text:
        return values, 0, ()
    vocabulary, note = parse_vocabulary(take.vocabulary)
    made = encode([row.text for row in rows], vocabulary, take.length)
    notes = [note]
    for count, of, what in (
        (made.cut, len(rows), f"texts are cut at {take.length} tokens (--length)"),
        (made.unknown, made.words, "words are not in the vocabulary"),
        (
            count_sharing(vocabulary),
            len(vocabulary.number),
            "different words share a number with another one",
        )
        if isinstance(vocabulary, Hashed)
        else (0, 0, ""),
    ):
        if count:
            notes.append(f"{count} of {of} {what}")
    missing = (made.x == 0).all(axis=1) | np.array([not row.text for row in rows])
    made.x[missing] = 0
    alone = not values.shape[1]
    if missing.any() and alone:
        raise DataError(
            f"{rows[int(missing.argmax())].where}: {take.text} has no word; fill or drop such rows"
        )
    if missing.any():
        notes.append(
            f"{missing.sum()} of {len(rows)} samples have no text: it counts as missing"
        )
    if alone:
        return made.x, vocabulary.size, tuple(notes)
    return together({TABLE: values, TEXT: made.x}), vocabulary.size, tuple(notes)


def new_inputs(
    rows: Samples, table: DataFrame | None, recipe: Recipe
) -> tuple[Array, int, Names]:
    """Return inputs as :func:`read_inputs` by a recipe, from a ``table`` of ``recipes.pipeline.convert``.

    Raises DataError for gaps without a value.
    """
    assert table is not None
    if open_ := [
        own.name for own in recipe.used if own.fill != "refuse" and own.fill_value is None
    ]:
        raise DataError(
            f"the recipe has no fill-value for {few(open_)}: import the rows for training with it first, and take the "
            "recipe that is written then (rows of fewer than three patients are not divided)"
        )
    own = recipe.text
    take = (
        Take(text=own.column, vocabulary=own.vocabulary, length=own.length)
        if own.column
        else Take()
    )
    return read_inputs(rows, transform(table, recipe), take)


def count_sharing(vocabulary: Hashed) -> int:
    """Count the hashed words that share a token with another word."""
    tokens = np.array(list(vocabulary.number.values()))
    counts = np.bincount(tokens) if len(tokens) else np.zeros(1, int)
    return int(counts[counts > 1].sum())


def copies(rows: Samples, places: Array) -> Names:
    """Return a note on texts of the test part that are also in another. ``places``: the part of each row, text (n,)."""
    elsewhere = {row.text for row, place in zip(rows, places, strict=True) if place != "test"}
    tested = [row for row, place in zip(rows, places, strict=True) if place == "test"]
    again = sum(row.text in elsewhere for row in tested if row.text)
    if not again:
        return ()
    return (
        f"{again} of {len(tested)} test samples have a text that is trained on, too: tests are too easy by that",
    )
