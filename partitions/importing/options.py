"""Options of an import."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from partitions.importing.notes import ALL_COLUMNS, Take
from partitions.recipes.pictures import PictureRecipe
from partitions.recipes.reading import ReadOptions
from partitions.recipes.recipe import Recipe


@dataclass(frozen=True)
class ImportOptions(ReadOptions):
    """Options of an import: how pictures and scans are read, how the source is written, and what is taken of it.

    ``label``: the label column of a csv, or several, joined by commas; ``survival``: the columns of time and event in
    their place; ``labels``: names of all classes, in order; ``labels_from``: a csv of labels by study or patient;
    ``seed``: of the split, where the source has none. ``take``: how a csv is written, the column of texts, what they
    become, which numbers, and the column of patients. ``recipe``: how to read a table, in place of all that, and
    ``pictures``: how to read pictures and scans; ``as_gaps``: cells that do not fit the recipe are gaps. ``subgroup``:
    the column of subgroups (``subgroups.parse_column``). ``overwrite``: whether the data file may be there already;
    ``cohort``: a name for the people whose data these are. Raises DataError for values out of their range.
    """

    label: str | None = None
    labels: Sequence[str] = ()
    labels_from: str | Path | None = None
    seed: int = 42
    survival: tuple[str, str] | None = None
    task: str = "auto"
    take: Take = ALL_COLUMNS
    recipe: Recipe | None = None
    pictures: PictureRecipe | None = None
    as_gaps: bool = False
    overwrite: bool = False
    cohort: str = ""
    subgroup: str = ""

    @property
    def reading(self) -> ReadOptions:
        """Read options of pictures and scans alone, as a recipe keeps them: its own, where there is one."""
        if self.pictures:
            return self.pictures.reading
        return ReadOptions(**{f.name: getattr(self, f.name) for f in fields(ReadOptions)})


DEFAULTS = ImportOptions()
