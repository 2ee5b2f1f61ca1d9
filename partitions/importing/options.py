"""Options of an import."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from partitions.common.errors import DataError, Problems
from partitions.common.names import Names
from partitions.importing.files import Faults
from partitions.recipes.cells import GROUPS
from partitions.recipes.pictures import PictureRecipe
from partitions.recipes.reading import ReadOptions
from partitions.recipes.recipe import Recipe
from partitions.recipes.signs import Asked
from partitions.tokens import BUCKETS, LENGTH, MOST_LENGTH

# Of a csv's cells, by the name in an option
SEPARATORS = {",": ",", ";": ";", "|": "|", "\t": "\t", "tab": "\t", "\\t": "\t"}


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


@dataclass(frozen=True)
class ImportOptions(ReadOptions):
    """Options of an import. Raises DataError for values out of their range.

    * ``label``: the label column of a csv, or several, joined by commas; ``survival``: instead, the columns of time and
      event; ``labels``: names of all classes, in order; ``labels_from``: a csv of labels by study or patient.
    * ``unlabelled``: findings or outlines of the federation that the source is not labelled with.
    * ``seed``: of the split, where the source has none.
    * ``take``: the format of a csv, and its columns of texts, numbers and patients.
    * ``recipe``: how to read a table, instead of the above; ``pictures``: how to read pictures and scans; ``as_gaps``:
      cells that do not fit the recipe are gaps.
    * ``subgroup``: the column of subgroups (``subgroups.parse_column``).
    * ``faults``: files that cannot be read, and whether they are left out.
    * ``problems``: takes what can be named before any scan is decoded, so that one run names all.
    * ``overwrite``: whether the data file may exist already; ``cohort``: a name for the people in the data.
    """

    label: str | Names | None = None
    labels: Sequence[str] = ()
    labels_from: Path | None = None
    unlabelled: Names = ()
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
    problems: Problems = field(default_factory=Problems)

    @property
    def reading(self) -> ReadOptions:
        """Return the options for reading pictures and scans: those of the recipe, if there is one."""
        return self.pictures.reading if self.pictures else self


DEFAULTS = ImportOptions()
