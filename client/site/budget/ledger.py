"""The ledger of what differential privacy has cost at this site: a hash chain of lines, like the audit log.

    STATE_DIR/budget/budget-000001.jsonl ...    a line per charge, and per reply that left
    STATE_DIR/budget/head.json                  number and hash of the last line

A training message is charged before the training, so it also counts if its process is killed. The same message of the
same Flower run is free when repeated, as long as its cost and the bits of its reply are the same. A reply with other
bits is another release of the same data, and is charged before it leaves. A resumed run is another Flower run, and is
charged again. If a ledger is damaged, or shorter than before, nothing is allowed. The charges are computed by this
site (`accounting.py`) and compared with the rules ``epsilon`` and ``delta``.

Standard library only, as in trust/policy.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import SiteError
from ..trust.chain import EVERY, Chain, read_head
from ..trust.policy import Policy
from .accounting import Cost, default_delta, epsilon_of
from .cohort import FOLDER, DataFile, cohort_of, noted

CHARGE, SENT = "charge", "sent"
Line = Mapping[str, Any]


@dataclass(frozen=True)
class Release:
    """A training message and its cost. ``key``: equal for repetitions of a message, see `release.key_of`."""

    key: str
    silo: str
    run_id: str
    run: str
    round: int
    data: DataFile
    cost: Cost


@dataclass(frozen=True)
class Spent:
    """Epsilon of a cohort before and after a release, at the cohort's delta."""

    before: float
    after: float
    delta: float


class Ledger(Chain):
    """The ledger in one state directory."""

    kind = "budget"
    required = EVERY | {"kind", "silo", "run-id", "message"}

    def __init__(self, state: Path) -> None:
        super().__init__(state / FOLDER)
        self.state = state

    def lines(self) -> Sequence[Line]:
        """Return all lines. Raises SiteError if one is changed or missing."""
        if read_head(self.folder) is None and not any(self.folder.glob(f"{self.kind}-*.jsonl")):
            return []
        found = self.verify()
        if found.faults:
            raise SiteError(f"the ledger {self.folder} is not whole: {found.faults[0]}; restore the state directory")
        return found.entries

    def charge(self, release: Release, policy: Policy, attended: int = 0) -> Spent:
        """Charge a message, unless it was charged before at the same cost.

        ``attended``: the rounds of this run in which this silo's reply arrived; a ledger with fewer is an old copy.
        Raises SiteError if the budget does not allow it, OSError if it cannot be written.
        """
        with self.held():
            lines = self.lines()
            own = {line["round"] for line in charges(lines) if is_of_run(line, release)}
            if len(own - {release.round}) < attended:
                raise SiteError(
                    f"the server has had {attended} rounds of this run, and the ledger {self.folder} has {len(own)}: "
                    "the state directory is an older copy, or another one; restore the newest"
                )
            if any(pays_for(line, release) for line in charges(lines)):
                return self._unchanged(lines, release, policy)
            return self._charge(lines, release, policy)

    def note_reply(self, release: Release, reply: str, policy: Policy) -> Spent:
        """Note the digest of a reply before it leaves; charge it if another reply left for the same message.

        Only charges of the same cost cover it. Raises SiteError if the budget does not allow it, OSError if it cannot
        be written.
        """
        with self.held():
            lines = self.lines()
            of_message = [line for line in lines if line["message"] == release.key]
            sent = {line["reply"] for line in of_message if line["kind"] == SENT}
            spent = self._unchanged(lines, release, policy)
            paid = sum(pays_for(line, release) for line in charges(of_message))
            if reply in sent and paid:
                return spent
            if paid <= len(sent):
                spent = self._charge(lines, release, policy)
            self.write({**self._entry(release, SENT), "reply": reply})
            return spent

    def _charge(self, lines: Sequence[Line], release: Release, policy: Policy) -> Spent:
        """Write a charge, if the budget allows it. The caller holds the ledger's lock."""
        of_cohort, new = self.of_cohort(lines, release.data), {**release.cost.fields, "data": release.data.sha256}
        delta = delta_of([*of_cohort, new], policy)
        before, after = epsilon_of(of_cohort, delta), epsilon_of([*of_cohort, new], delta)
        if policy.epsilon and after > policy.epsilon:
            raise SiteError(
                f"its policy has {policy.line('epsilon')}, and this round would bring what is spent from {before:.3g} "
                f"to {after:.3g} (delta {delta:.1g}): silofl budget"
            )
        spent = {"epsilon-before": before, "epsilon-after": after, "delta": delta, "budget": policy.epsilon}
        about = {"cohort": release.data.cohort, "note": release.data.note}
        self.write({**self._entry(release, CHARGE), **new, **spent, **about})
        return Spent(before, after, delta)

    def _unchanged(self, lines: Sequence[Line], release: Release, policy: Policy) -> Spent:
        of_cohort = self.of_cohort(lines, release.data)
        delta = delta_of(of_cohort, policy)
        total = epsilon_of(of_cohort, delta)
        return Spent(total, total, delta)

    def of_cohort(self, lines: Sequence[Line], data: DataFile) -> list[Line]:
        """Return the charges of the people that a data file is about.

        Raises SiteError if the note of a charged version is missing or changed, since its people are then unknown.
        """
        files = {name: noted(self.state, name) for name in {line["data"] for line in charges(lines)}}
        for line in charges(lines):
            if (note := line.get("note")) and files[line["data"]].note != note:
                raise SiteError(f"{FOLDER}/data/{line['data']}.json was changed: restore the state directory")
        versions = cohort_of(data, files)
        return [line for line in charges(lines) if line["data"] in versions]

    def _entry(self, release: Release, kind: str) -> dict[str, Any]:
        run = {"run-id": release.run_id, "run": release.run, "round": release.round}
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return {"time": now, "kind": kind, "silo": release.silo, **run, "message": release.key}


def charges(lines: Iterable[Line]) -> Iterator[Line]:
    return (line for line in lines if line["kind"] == CHARGE)


def pays_for(line: Line, release: Release) -> bool:
    """Return whether a charge is for this message, these data and this cost."""
    wanted = {**release.cost.fields, "message": release.key, "data": release.data.sha256}
    return wanted.items() <= line.items()


def is_of_run(line: Line, release: Release) -> bool:
    return (line["run-id"], line["silo"]) == (release.run_id, release.silo)


def delta_of(of_cohort: Iterable[Line], policy: Policy) -> float:
    """Return the delta for a cohort's budget: the policy's, or the default for its largest version."""
    return policy.delta or default_delta(max((int(line["units"]) for line in of_cohort), default=0))
