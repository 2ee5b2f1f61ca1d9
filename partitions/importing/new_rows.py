"""New rows of a hospital's csv, or new pictures, read by the recipe of a data file or a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tqdm import tqdm

from partitions.common.errors import DataError
from partitions.importing.csv_source import Found
from partitions.importing.files import Faults
from partitions.importing.images import SampleSource
from partitions.importing.notes import Take, read_inputs
from partitions.importing.streams import count_notes, describe, probe_all, read_pictures
from partitions.recipes.pictures import PictureRecipe, photometric_notes
from partitions.recipes.pipeline import transform
from partitions.recipes.recipe import Recipe
from partitions.schema import few
from partitions.splits import Array


def new_inputs(found: Found, recipe: Recipe) -> tuple[Array, int, tuple[str, ...]]:
    """Return the inputs of rows, the size of the vocabulary, and notes. Raises DataError for gaps without a value."""
    assert found.table is not None
    if open_ := [own.name for own in recipe.used if own.fill != "refuse" and own.fill_value is None]:
        raise DataError(
            f"the recipe has no fill-value for {few(open_)}: import the rows for training with it first, and take the "
            "recipe that is written then (rows of fewer than three patients are not divided)"
        )
    own = recipe.text
    take = Take(text=own.column, vocabulary=own.vocabulary, length=own.length) if own.column else Take()
    return read_inputs(found.rows, transform(found.table, recipe), take)


@dataclass(frozen=True)
class NewPictures:
    """Samples whose pictures are read one by one; ``like``: shape and type of all pictures, (n, h, w, c)."""

    samples: list[SampleSource]
    recipe: PictureRecipe
    like: Array

    def __iter__(self) -> Iterator[Array]:
        with tqdm(total=len(self.samples), desc="pictures", unit="") as progress:
            yield from read_pictures(self.samples, self.recipe.reading, self.like, progress)


def new_pictures(
    found: Found, recipe: PictureRecipe, faults: Faults | None = None
) -> tuple[NewPictures, tuple[str, ...]]:
    """Return pictures to be read by a recipe, and notes. Raises DataError where they do not match the recipe."""
    samples = found.rows
    if any(sample.file is None for sample in samples):
        raise DataError("the recipe is of pictures, and these are rows of a table")
    samples, infos = probe_all(samples, recipe.reading, faults or Faults(None))
    like = describe(samples, infos, recipe)
    notes = (*count_notes(infos), *photometric_notes([info.acquired for info in infos], recipe.expected))
    return NewPictures(samples, recipe, like), notes
