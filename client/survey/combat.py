"""A hospital's exact sums for ComBat (``silofl survey --harmonize``): which columns, which rows, and how often.

The run's settings name columns and covariates, since all hospitals must use the same. Each selection is a set of
equations about the patients, so a hospital answers one selection, once. It keeps the selection and the answer in
``released-combat.json`` in the state directory. The same selection gets the same answer, also after a few patients
changed. Another selection, or other data, is refused until the hospital itself removes that file (docs/attacks.md).
Sums over few patients are withheld, by the rules of ``models/survey/exact.py``. All sums are withheld if there are too
many covariates for the number of patients.

Without covariates a column's rows are those with a value. With covariates all columns use the same rows, those with
all values: otherwise two sums of one covariate could differ by one patient, and reveal that patient's value.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from client.session import ClientSession
from client.site.trust.policy import Policy, PolicyRefusedError
from models.survey.columns import table_of
from models.survey.combat import sums_of
from models.survey.exact import has_small_cells, is_discrete, kept_rows, patients, tells_label, tells_of_few
from partitions.common.errors import DataError, UserError
from partitions.common.files import locked, write_atomically
from partitions.common.names import nearest
from partitions.patients import fewest_changed, patient_digests
from partitions.recipes.combat import design
from partitions.recipes.places import TableColumn, columns_of, terms_of
from partitions.recipes.recipe import Recipe
from partitions.schema import few
from partitions.silo_file import Contents
from partitions.site_split import parts_of, rows_of, sample_digests
from partitions.splits import Array, Split
from strategies.base.schema.combat import KEY, Part
from strategies.base.survey import SurveySettings

FILE, ALL = "released-combat.json", "all"
PATIENTS_PER_TERM = 10  # p covariates give p (p + 1) / 2 equations about n p values, so few of them for n patients


@dataclass(frozen=True)
class Selection:
    """The columns to harmonise and the covariates, with their places in the hospital's table."""

    columns: tuple[TableColumn, ...]
    covariates: tuple[TableColumn, ...]

    @property
    def names(self) -> dict[str, list[str]]:
        return {key: [own.name for own in getattr(self, key)] for key in ("columns", "covariates")}

    @property
    def terms(self) -> list[str]:
        """Return the covariates' terms; a category's first level is the reference and has none."""
        return [t for own in self.covariates for t in [*own.terms][own.kind == "category" :]]


@dataclass(frozen=True)
class Rows:
    """The training part: table (n, columns), mask of missing values (same shape), labels, patients (n,)."""

    table: Array
    gone: Array
    y: Array
    units: Array


def answer_combat(
    session: ClientSession,
    contents: Contents,
    recipe: Recipe | None,
    digests: Callable[[Split, Array | None], list[str]],
) -> tuple[Part, dict[str, list[str]]]:
    """Return the ComBat part of a survey's answer, empty if not asked for, and what is withheld, by rule, for the log.

    ``digests`` returns a text per patient. A refusal is returned as ``refused``, since the survey itself goes on.
    """
    settings, policy = session.settings.method, session.policy
    assert isinstance(settings, SurveySettings)
    if not settings.harmonize:
        return {}, {}
    try:
        if not policy.combat:
            raise PolicyRefusedError(f"its policy has {policy.line('combat')}, the run survey.harmonize")
        selection = chosen(settings, contents, recipe)
        split, gaps = training_part(contents)
        table = table_of(split)
        rows = Rows(table, np.zeros(table.shape, bool) if gaps is None else gaps, split.y, split.units)
        if policy.public:
            return {KEY: sums_for(selection, rows, policy)[0]}, {}
        state = str(session.context.node_config.get("state-dir", ""))
        found, note = once(selection, rows, policy, digests(split, gaps), state)
        return {KEY: found}, note
    except (PolicyRefusedError, UserError, DataError) as error:
        return {KEY: {"refused": str(error)}}, {"combat": [settings.harmonize]}


def training_part(contents: Contents) -> tuple[Split, Array | None]:
    """Return the training samples and the mask of their missing values."""
    own, rows = parts_of(contents.splits)["train"]
    split, gaps = contents.splits[own], contents.gaps.get(own)
    return (split, gaps) if rows is None else (rows_of(split, rows), None if gaps is None else gaps[rows])


# ---- The choice ------------------------------------------------------------------------------------------------------


def chosen(settings: SurveySettings, contents: Contents, recipe: Recipe | None) -> Selection:
    """Return the columns that a run names. Raises UserError for one that cannot be harmonised, or be a covariate."""
    if recipe and recipe.combat:
        raise UserError("its data file is harmonised already: survey the file without [combat]")
    if contents.recipe and not recipe:
        raise UserError("its data file's recipe is none of columns alone, and may have [combat]: nothing is harmonised")
    train = contents.splits[parts_of(contents.splits)["train"][0]]
    count = table_of(train).shape[1]
    known = {own.name: own for own in columns_of(contents.schema, recipe, count)} if count else {}
    labels = {"label", *contents.schema.labels, *(recipe.label if recipe else ())}
    wanted = [name.strip() for name in settings.covariates.split(",") if name.strip()]
    if label := [name for name in wanted if name in labels and name not in known]:
        raise UserError(
            f"the covariate {label[0]!r} is the label: a future patient has none, so nothing could be harmonised by it"
        )
    names = [name.strip() for name in settings.harmonize.split(",") if name.strip()]
    if names == [ALL]:
        names = [name for name, own in known.items() if own.kind == "number" and name not in wanted]
    if unknown := [name for name in (*names, *wanted) if name not in known]:
        raise UserError(f"it has no column {unknown[0]!r}{nearest(unknown[0], known)}")
    if other := [name for name in names if known[name].kind != "number"]:
        raise UserError(f"{other[0]!r} is a {known[other[0]].kind}: only columns of numbers are harmonised")
    if twice := [name for name, times in Counter([*names, *wanted]).items() if times > 1]:
        raise UserError(f"{twice[0]!r} is named twice: a column is harmonised, or a covariate")
    if not names:
        raise UserError("it has no column of numbers to harmonise")
    return Selection(tuple(known[name] for name in names), tuple(known[name] for name in wanted))


# ---- Once ------------------------------------------------------------------------------------------------------------


def once(
    selection: Selection, rows: Rows, policy: Policy, samples: Sequence[str], state: str
) -> tuple[Part, dict[str, list[str]]]:
    """Return the earlier answer, or compute and save the first one. Raises PolicyRefusedError."""
    if not state:
        raise PolicyRefusedError("it has no state-dir to remember what it gave for ComBat")
    file = Path(state) / FILE
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with locked(file.with_suffix(".lock"), "another process of this silo is at its sums for ComBat"):
            before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
            if before is not None and not may_try_again(before, selection, policy, samples):
                return before["answer"], {}
            answer, note = sums_for(selection, rows, policy)
            noted = {"choice": selection.names, "least": least_of(policy), "samples": list(samples), "answer": answer}
            write_atomically(file, json.dumps(noted), mode=0o600)
            return answer, note
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, PolicyRefusedError):
            raise
        raise PolicyRefusedError(
            f"what it gave for ComBat before cannot be remembered ({FILE}: {type(error).__name__})"
        ) from None


def may_try_again(before: dict[str, Any], selection: Selection, policy: Policy, samples: Sequence[str]) -> bool:
    """Return whether the first answer was a refusal, and data or rule have changed since. Raises PolicyRefusedError."""
    day, (own, then) = before["answer"]["day"], (Counter(samples), Counter(before["samples"]))
    changed = fewest_changed(own, then)
    remove = f"a second answer needs the hospital to remove {FILE} (docs/attacks.md)"
    if before["choice"] != selection.names:
        chose = ", ".join(before["choice"]["columns"])
        raise PolicyRefusedError(f"it gave sums of {chose:.200} on {day}, and answers one choice; {remove}")
    if before["answer"].get("refused"):
        return bool(before["least"] != least_of(policy) or changed >= least_of(policy))
    if changed >= least_of(policy):
        raise PolicyRefusedError(f"its data changed since its sums of {day}; {remove}")
    return False


# ---- The sums --------------------------------------------------------------------------------------------------------


def least_of(policy: Policy) -> int:
    """Return the fewest patients behind a sum, and behind each category of a covariate."""
    return 1 if policy.public else max(policy.min_sum_samples, policy.min_cell)


def sums_for(selection: Selection, rows: Rows, policy: Policy) -> tuple[Part, dict[str, list[str]]]:
    """Return the answer and what is withheld, by rule. ``day``: the date of this answer, empty for public data."""
    least, gap = least_of(policy), 1 if policy.public else policy.min_cell
    day = "" if policy.public else time.strftime("%Y-%m-%d", time.gmtime())
    rule = policy.line("min_cell" if policy.min_cell > policy.min_sum_samples else "min_sum_samples")
    held = f"its policy has {rule}, and exact sums would be about fewer patients"
    part: Part = {"day": day}
    order = patient_digests(sample_digests(rows.table), rows.units)
    places = [own.places[0] for own in (*selection.columns, *selection.covariates)]
    common = kept_rows(np.any(rows.gone[:, places], axis=1), rows.units, order, gap)
    groups: list[list[Array]] = []
    if selection.covariates:
        if fault := covariate_fault(selection, rows, common, least, held, public=policy.public):
            return part | {"refused": fault}, {"combat": [fault]}
        groups = cells_of(selection, rows, common)
        x = design(rows.table[common], selection.terms, terms_of(selection.covariates))
        shared = sums_of(np.zeros(len(x)), x)
        part |= {"covariates": selection.terms, "x": shared.x.tolist(), "xx": shared.xx.tolist()}
    note: dict[str, list[str]] = {}
    columns, withheld = dict[str, Part](), dict[str, str]()
    for own in selection.columns:
        kept = common if selection.covariates else kept_rows(rows.gone[:, own.places[0]], rows.units, order, gap)
        y, units = rows.table[kept, own.places[0]], rows.units[kept]
        cells = [cell for cells in groups for cell in cells]
        others = [*measured(selection, rows, kept).values()]
        why = "" if policy.public else tells_of_few(y, units, cells, least, others) if len(y) else "no value"
        if patients(units) < least or why:
            withheld[own.name] = held if not policy.public else "no value"
            note.setdefault("combat", []).append(f"{own.name}: {why or rule}")
            continue
        sums = sums_of(y, design(rows.table[kept], selection.terms, terms_of(selection.covariates)))
        columns[own.name] = {"n": sums.n, "mean": sums.mean, "square": sums.square, "xy": sums.xy.tolist()}
    return part | {"columns": columns, "withheld": withheld}, note


def covariate_fault(selection: Selection, rows: Rows, kept: Array, least: int, held: str, *, public: bool) -> str:
    """Return why these covariates' sums cannot leave; empty if they can. The text contains no value of the rows."""
    units = rows.units[kept]
    if patients(units) < least:
        return held
    for own in selection.covariates:
        if tells_label(code_of(own, rows.table[kept]), rows.y[kept]):
            return f"the covariate {own.name!r} gives the label away, which a future patient does not have"
    if public:
        return ""
    if patients(units) < (needed := PATIENTS_PER_TERM * len(selection.terms)):
        return f"{len(selection.terms)} covariates, categories counted singly, need {needed} patients: name fewer"
    groups = cells_of(selection, rows, kept)
    if has_small_cells(groups, units, least):
        return f"{held} in a category of {few([own.name for own in selection.covariates])}"
    cells = [cell for group in groups for cell in group]
    found = measured(selection, rows, kept)
    for i, (name, values) in enumerate(found.items()):
        if tells_of_few(values, units, cells, least, [*found.values()][:i]):
            return f"{held} ({name})"
    return ""


def measured(selection: Selection, rows: Rows, kept: Array) -> dict[str, Array]:
    """Return the covariates (n,) without categories, by name."""
    found = {own.name: code_of(own, rows.table[kept]) for own in selection.covariates if own.kind != "category"}
    return {name: values for name, values in found.items() if not is_discrete(values)}


def cells_of(selection: Selection, rows: Rows, kept: Array) -> list[list[Array]]:
    """Return the rows of each category of each covariate that has some; numbers with few values count as categories."""
    groups = []
    for own in selection.covariates:
        values = code_of(own, rows.table[kept])
        if own.kind == "category":
            groups.append([values == code for code in range(len(own.levels))])
        elif is_discrete(values):
            groups.append([values == value for value in np.unique(values)])
    return groups


def code_of(column: TableColumn, table: Array) -> Array:
    """Return a covariate's numbers (n,), or the indices of its categories."""
    found = design(table, [*column.terms], column.terms)
    return found.argmax(1) if column.kind == "category" else found[:, 0]
