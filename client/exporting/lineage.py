"""Where a model comes from: the chain from its file over card, audit line and run to study, data and code.

``silofl export`` at a hospital puts into the card what the site's own audit log has of the last reply that trained the
model: the line's hash pins the rest. ``silofl lineage`` prints that, and verifies each link for which it has the other
end: the model against its card, the card against the log, the data, the study and the app against their sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from client.exporting.model_card import Lineage
from client.flower.apps import build
from client.protocol.code import content_sum
from client.protocol.parsed import SiteError
from client.protocol.study import parse_study
from client.site.trust.audit import kind_of, verify_log
from partitions.common.errors import DataError, UserError
from partitions.common.files import file_sum
from partitions.common.parsed import read_text
from partitions.silo_file import Check

EXPORT = "export it again at the hospital that trained it"
PASS = "not checked: {} names it"


def lineage_of(folder: Path, about: Mapping[str, Any], last: int) -> dict[str, Any]:
    """Return the entry of a card with what the audit log has of a model; empty without a log.

    ``folder``: the silo's states of the run, STATE_DIR/RUN/STRATEGY-SEED/SILO/run-ID; ``about``: the silo's description
    in the state; ``last``: the model's round. Raises UserError if the log is not whole.
    """
    state, run = folder.parents[3], folder.parents[2].name
    if not (state / "audit").is_dir():
        return {}
    verdict = verify_log(state / "audit")
    if verdict.faults:
        raise UserError(
            f"the audit log is not whole: {verdict.faults[0]}; silofl audit {state}"
        )
    wanted = {"run": run, "silo": about["silo"], "method": about["method"]}
    for entry in reversed(verdict.entries):
        if (
            wanted.items() <= entry.items()
            and kind_of(entry) == "model"
            and entry["round"] <= last
        ):
            return {"lineage": Lineage.of(entry).model_dump(exclude_none=True)}
    return {}


def lineage_checks(
    known: Lineage, state: Path | None, data: Path | None, study: Path | None, app: Path | None
) -> list[Check]:
    """Return a check of each link of a card's lineage."""
    checks = [
        _line_check(known, state),
        _sum_check("data", known.data, data, "--data", file_sum),
        _sum_check("app", known.app, app, "--app", lambda path: content_sum(build(path))),
    ]
    if known.study:
        checks.append(_sum_check("study", known.study["digest"], study, "--study", _study_sum))
    return checks


def _line_check(known: Lineage, state: Path | None) -> Check:
    what = f"run {known.run}, round {known.round}, {known.time}: line {known.line} of the audit log, {known.hash}"
    if state is None:
        return Check("audit log", True, f"{what} ({PASS.format('--state-dir')})")
    try:
        verdict = verify_log(state / "audit")
    except (SiteError, OSError) as error:
        return Check("audit log", False, str(error), "name the silo's state directory")
    entry = next((each for each in verdict.entries if each["line"] == known.line), None)
    if verdict.faults:
        return Check("audit log", False, verdict.faults[0], "silofl audit")
    if entry is None or Lineage.of(entry) != known:
        return Check("audit log", False, f"{what}: this log has another one there", EXPORT)
    return Check("audit log", True, f"{what}; {len(verdict.entries)} lines, none changed")


def _sum_check(
    name: str, wanted: str, path: Path | None, option: str, sum_of: Callable[[Path], str]
) -> Check:
    if path is None:
        return Check(name, True, f"{wanted} ({PASS.format(option)})")
    try:
        got = sum_of(path)
    except (OSError, SiteError, DataError) as error:
        return Check(name, False, f"{path}: {error}", f"{option} names another one")
    if got != wanted:
        return Check(
            name,
            False,
            f"{path} has {got}, the model is of {wanted}",
            f"{option} names another one",
        )
    return Check(name, True, f"{path} {wanted}")


def _study_sum(path: Path) -> str:
    return parse_study(read_text(path), str(path)).digest
