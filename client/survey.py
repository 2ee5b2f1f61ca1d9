"""The reply to ``silofl survey``, made from the hospital's own file, schema and policy; the message selects nothing.

Under masks the message has the columns that all hospitals state alike, and the run's settings have times and groups.
The first choice of them is answered; another one about the same patients is refused.

The memory of a hospital's survey answers: the same question gets the same answer, though a few patients changed.

The record in the state directory keeps each answer with the digests of its patients. The same patients
get the same answer. Data that differ in fewer than ``min-sum-samples`` patients get the earlier answer, with its day,
since the difference of two answers would be about those few. Another schema, recipe or policy makes another answer,
whose bins may differ. At most ``max-surveys`` answers are given in all.
"""

from __future__ import annotations

import functools
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import RecordDict

from client.egress import release_sum, release_survey
from client.local_data import is_own_file
from client.protocol.parsed import SiteError
from client.protocol.policy import Policy, PolicyRefusedError
from client.session import ClientSession
from client.site.record import Record, disclose
from models.evidence.pooled import (
    CURVE,
    Layout,
    cells_of,
    group_names,
    grouped,
    groups_in,
    numbers_of,
    stated_columns,
    survival_table,
)
from models.evidence.survey import Item, ReleaseLimits, survey, table_of
from models.evidence.survey import is_suppressed as is_suppressed
from partitions.common.errors import DataError, UserError
from partitions.patients import fewest_changed
from partitions.recipes.pictures import read_any
from partitions.recipes.recipe import Recipe
from partitions.schema import Schema
from partitions.silo_file import Contents, read_contents
from partitions.site_split import people_digests
from partitions.splits import Array, Split, inputs_of, is_table, join_splits
from partitions.stored import sample_digests
from strategies.base.survey import Answer, read_columns
from strategies.base.transport.reporting import COLUMNS


def answer_survey(session: ClientSession, config: Mapping[str, Any]) -> RecordDict:
    """Return the reply to a survey message. Raises PolicyRefusedError if the silo has too few patients.

    The run's settings must declare a survey, so that policy and study have allowed it; otherwise UserError is raised.
    """
    if session.info.role.asks != "survey":
        raise UserError(
            f"{session.name} refuses: the run has strategy = {session.info.name}, and a message asks for a survey"
        )
    policy = session.policy
    split, gaps, contents = samples_of(session)
    limits = limits_of(policy)
    rule = max(("min_cell", "floor"), key=lambda name: int(getattr(policy, name)))
    if split.people < getattr(policy, rule):
        raise PolicyRefusedError(
            f"{session.name} refuses: its policy has {policy.line(rule)}, it has fewer patients"
        )
    recipe = table_recipe(contents.recipe)
    about = contents.schema, recipe, contents.classes, contents.task, limits
    how, shared = how_of(contents.schema, recipe, limits), None
    if session.settings.common.secure_aggregation:
        shared = SharedSurvey.of(session, config)
        how = f"{how} {shared.digest}"

    def make_answer() -> Answer:
        day = "" if policy.public else time.strftime("%Y-%m-%d", time.gmtime())
        if shared is None:
            return {"day": day, **survey(split, gaps, *about)}
        names = group_names(shared.by, split, gaps, contents.schema, recipe)
        of_rows = functools.partial(survey, split, gaps, *about)

        def of_group(rows: Array) -> Item:
            return of_rows(rows) | shared.curve(split, rows, contents.task, limits)

        return {"day": day, "groups": grouped(names, split, limits, of_group)}

    answer, withheld = make_answer() if policy.public else {}, dict[str, list[str]]()
    if not policy.public:
        samples = digests_of(split, gaps)
        answer, note = answer_once(
            make_answer, samples, how, policy, session.state_dir, session.name
        )
        for each in answer.get("groups", {"": answer}).values():
            for rule_, items in list_withheld(each, policy, note).items():
                withheld[rule_] = [*dict.fromkeys([*withheld.get(rule_, ()), *items])]
    if shared is None:
        return release_survey(session.name, answer, withheld)
    return release_sum(session.name, shared.numbers(answer["groups"]), withheld)


@dataclass(frozen=True)
class SharedSurvey:
    """What the hospitals of a survey under masks have in common. ``layout``: the columns that all state alike."""

    layout: Layout
    times: Sequence[float]
    by: str

    @classmethod
    def of(cls, session: ClientSession, config: Mapping[str, Any]) -> SharedSurvey:
        """Return that of a message. Raises UserError for a column that this hospital states otherwise.

        The sum of a column that a hospital lacks would be over the others alone.
        """
        layout, here = read_columns(config.get(COLUMNS)), json.loads(state_columns(session))
        for part, columns in layout.items():
            for name, stated in columns.items():
                if here[part].get(name) != stated:
                    raise UserError(
                        f"{session.name} refuses: it states {name[:80]!r} otherwise than the sum has it, or not at all"
                    )
        method = session.settings.method
        return cls(layout, method.edges, method.by)

    @property
    def digest(self) -> str:
        content = json.dumps([self.layout, self.times, self.by], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    def curve(self, split: Split, rows: Array, task: str, limits: ReleaseLimits) -> Item:
        """Return the survival table of these samples; empty where no times are agreed, or the policy keeps it."""
        if not self.times or task != "survival" or not limits.classes:
            return {}
        return {CURVE: survival_table(split.y[rows], split.units[rows], self.times, limits)}

    def numbers(self, groups: Mapping[str, Item]) -> list[float]:
        return numbers_of(
            groups, self.layout, groups_in(self.layout, self.by), cells_of(self.times)
        )


def state_columns(session: ClientSession) -> str:
    """Return what this silo states of its columns for a sum, as JSON, without any number of patients."""
    split, gaps, contents = samples_of(session)
    about = contents.schema, table_recipe(contents.recipe), contents.classes, contents.task
    every = np.full(len(split), True)
    answer = survey(split, gaps, *about, limits_of(session.policy), every)
    return json.dumps(stated_columns(answer))


def samples_of(session: ClientSession) -> tuple[Split, Array | None, Contents]:
    """Return all samples of the silo, the mask of their missing values, and the contents of its file."""
    context = session.context
    if is_own_file(context):
        path = Path(str(context.node_config["data"]))
        return _own(path, path.stat().st_mtime_ns if path.exists() else 0)
    data = session.data
    parts = {"train": data.train, "val": data.val, "test": data.test}
    contents = Contents(
        parts, data.classes, data.task, data.vocabulary, data.schema, data.recipe
    )
    return join_splits([*parts.values()]), None, contents


@functools.lru_cache(maxsize=2)
def _own(path: Path, stamp: int) -> tuple[Split, Array | None, Contents]:
    contents = read_contents(path)
    gaps = (
        np.concatenate([contents.gaps[part] for part in contents.splits])
        if contents.gaps
        else None
    )
    return join_splits([*contents.splits.values()]), gaps, contents


def table_recipe(text: str) -> Recipe | None:
    """Return the recipe of a table in a file's text; None if there is none, or one for pictures."""
    try:
        recipe = read_any(text) if text else None
    except DataError:
        recipe = None
    return recipe if isinstance(recipe, Recipe) and not recipe.text.column else None


def limits_of(policy: Policy) -> ReleaseLimits:
    """Return the limits that a policy sets for a survey's statistics."""
    if policy.public:
        return ReleaseLimits(1, 1, True, True)
    return ReleaseLimits(
        policy.min_cell, policy.min_sum_samples if policy.sums else 0, policy.class_means
    )


def digests_of(split: Split, gaps: Array | None) -> list[str]:
    """Return one text per patient, equal for equal inputs, labels and gaps of all the patient's samples.

    Fill values of gaps are left out: they change for every patient when one more is imported.
    """
    table = table_of(split)
    known = table if gaps is None else np.where(gaps, np.float32(0), table)
    others = [x for x in inputs_of(split.x).values() if not is_table(x)]
    parts = [known, *others, split.y, *([] if gaps is None else [gaps])]
    return people_digests(
        sample_digests(np.stack([sample_digests(part) for part in parts], axis=1)), split
    )


def how_of(schema: Schema, recipe: Recipe | None, limits: ReleaseLimits) -> str:
    """Return a digest of what, beside the samples, the answer depends on; no statistic uses fill values."""
    content = recipe.content if recipe else {}
    columns = [
        {key: v for key, v in column.items() if key != "fill-value"}
        for column in content.get("columns", ())
    ]
    content_parts = [schema.text, content | {"columns": columns}, asdict(limits)]
    return hashlib.sha256(json.dumps(content_parts, sort_keys=True).encode()).hexdigest()


def list_withheld(
    answer: Answer, policy: Policy, note: dict[str, list[str]]
) -> dict[str, list[str]]:
    """Return what is withheld, by rule, for the hospital's audit log."""
    columns = {**answer["columns"], **answer["labels"]}
    withheld = {"min-cell": [name for name, item in columns.items() if is_suppressed(item)]}
    numeric = [
        name
        for name, item in answer["columns"].items()
        if item["kind"] != "category" and "mean" not in item
    ]
    withheld["sums" if not policy.sums else "min-sum-samples"] = [
        n for n in numeric if "range" in answer["columns"][n]
    ]
    withheld["range"] = [name for name in numeric if "range" not in answer["columns"][name]]
    if not policy.class_means:
        withheld["class-means"] = ["class counts"]
    return {rule: names for rule, names in {**withheld, **note}.items() if names}


# The memory of answers


KIND = "survey"  # of the rows of `disclosed` in the record


def answer_once(
    make: Callable[[], Answer],
    samples: Sequence[str],
    how: str,
    policy: Policy,
    state: str,
    silo: str,
) -> tuple[Answer, dict[str, list[str]]]:
    """Return the answer and what more of it is withheld, by rule. ``samples``: the patients' digests, sorted.

    ``how``: a digest of what else the answer depends on. Raises PolicyRefusedError if another answer would reveal few
    patients, if ``max-surveys`` is reached, or if answers cannot be saved.
    """
    if not state:
        raise PolicyRefusedError(
            f"{silo} refuses: it has no state-dir to remember what it told in surveys"
        )
    try:
        with Record(Path(state)).write() as db:
            rows = db.execute(
                "SELECT question, people, answer FROM disclosed WHERE kind = ?", (KIND,)
            ).fetchall()
            earlier = [
                {"how": question, "samples": people.split(), "answer": json.loads(text)}
                for question, people, text in rows
            ]
            answer, note, new = _answer(make, samples, how, policy, silo, earlier)
            if new:
                disclose(db, KIND, question=how, answer=json.dumps(answer), people=samples)
            return answer, note
    except (OSError, SiteError, json.JSONDecodeError) as error:
        why = f"what it told in surveys before cannot be remembered ({error})"
        raise PolicyRefusedError(f"{silo} refuses: {why}") from None


def _answer(
    make: Callable[[], Answer],
    samples: Sequence[str],
    how: str,
    policy: Policy,
    silo: str,
    answered: Sequence[dict[str, Any]],
) -> tuple[Answer, dict[str, list[str]], bool]:
    """Return the answer, what is withheld, and whether it is a new one."""
    few, near = policy.line("min_sum_samples"), list[dict[str, Any]]()
    shared = how.partition(" ")[2]
    for earlier in answered:
        changed = fewest_changed(samples, earlier["samples"])
        other = earlier["how"].partition(" ")[2]
        if changed < policy.min_sum_samples and shared and other not in ("", shared):
            raise PolicyRefusedError(
                f"{silo} refuses: its policy has {few}, fewer patients differ from those of its survey under masks of "
                f"{earlier['answer']['day']}, which had other columns, survey.times or survey.by: ask for those again"
            )
        if not changed and earlier["how"] == how:
            return earlier["answer"], {}, False
        near += [earlier] if 0 < changed < policy.min_sum_samples else []
    for earlier in near:
        if earlier["how"] == how:
            day = earlier["answer"]["day"]
            return (
                earlier["answer"],
                {"min-sum-samples": [f"changes of the data since {day}"]},
                False,
            )
    if near:
        day = near[0]["answer"]["day"]
        raise PolicyRefusedError(
            f"{silo} refuses: its policy has {few}, fewer patients differ from those of its survey of {day}, and its "
            "schema, recipe or policy is another one"
        )
    if policy.max_surveys and len(answered) >= policy.max_surveys:
        raise PolicyRefusedError(
            f"{silo} refuses: its policy has {policy.line('max_surveys')}, and this would be number {len(answered) + 1}"
        )
    return make(), {}, True
