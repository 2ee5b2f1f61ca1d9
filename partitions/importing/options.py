"""Options of an import."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from partitions.importing.files import Faults
from partitions.importing.notes import ALL_COLUMNS, Take
from partitions.recipes.pictures import PictureRecipe
from partitions.recipes.reading import ReadOptions
from partitions.recipes.recipe import Recipe


@dataclass(frozen=True)
class ImportOptions(ReadOptions):
    """Options of an import. Raises DataError for values out of their range.

    * ``label``: the label column of a csv, or several, joined by commas; ``survival``: instead, the columns of time and
      event; ``labels``: names of all classes, in order; ``labels_from``: a csv of labels by study or patient.
    * ``seed``: of the split, where the source has none.
    * ``take``: the format of a csv, and its columns of texts, numbers and patients.
    * ``recipe``: how to read a table, instead of the above; ``pictures``: how to read pictures and scans; ``as_gaps``:
      cells that do not fit the recipe are gaps.
    * ``subgroup``: the column of subgroups (``subgroups.parse_column``).
    * ``faults``: files that cannot be read, and whether they are left out.
    * ``overwrite``: whether the data file may exist already; ``cohort``: a name for the people in the data.
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
    faults: Faults = field(default_factory=Faults)

    @property
    def reading(self) -> ReadOptions:
        """Return the options for reading pictures and scans: those of the recipe, if there is one."""
        if self.pictures:
            return self.pictures.reading
        return ReadOptions(**{f.name: getattr(self, f.name) for f in fields(ReadOptions)})


DEFAULTS = ImportOptions()
