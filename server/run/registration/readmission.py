"""Silos that a run admits between two rounds: they were offline, had a fault, or join late."""

from __future__ import annotations

from typing import Any

from server.run.registration.data_summaries import (
    JOIN_SECONDS,
    SUMMARY_TRIES,
    Candidates,
    Joiner,
)
from server.run.registration.registration import Registration
from strategies.base.plan import OFFLINE, RoundPlan
from strategies.base.transport.data_summary import SUMS
from strategies.base.transport.reporting import is_refusal


class Readmission:
    """Admission of silos to the run of one :class:`Registration`."""

    def __init__(self, registration: Registration) -> None:
        self.registration, self.requests = registration, registration.requests
        self.common = registration.common
        self.reporter = registration.reporter
        self.late = registration.late

    def readmit(self, server_round: int) -> None:
        """Admit silos that were offline or had a fault when the run was resumed, and late joiners.

        They take part from this round on. A node that answers with an error is asked again in the next round.
        """
        offline = any(info.node_id == OFFLINE for info in self.registration.silos.values())
        if offline or self.late.awaits(self.registration.silos):
            for node, summary in self._newly_online().items():
                self._receive(node, summary, server_round)
        if due := self.late.due(server_round):
            online = self.requests.nodes()
            for name, joiner in due.items():
                if joiner.node in online:  # otherwise it joins when it is online again
                    self._join(name, joiner, server_round)

    def _newly_online(self) -> dict[int, dict[str, Any]]:
        """Return the data summaries of new nodes, and of nodes that had a fault before; report the other nodes."""
        registration, candidates = self.registration, Candidates()
        again = {node for node, reason in registration.faulty.items() if not is_refusal(reason)}
        new = [
            node
            for node in self.requests.nodes()
            if node not in registration.nodes or node in again
        ]
        self.requests.ask(new, candidates, late=True)
        for node, reason in candidates.faults.items():
            if registration.faulty.get(node) != reason:
                self.reporter.note(reason)
        registration.faulty = candidates.faults
        gone = [node for node in candidates.silent if not self.requests.may_crash(node)]
        for node in gone:
            self.reporter.note(
                f"a silo (node {node}) gave no data summary within {JOIN_SECONDS:g} s, {SUMMARY_TRIES} times"
            )
        registration.nodes |= {
            node: f"node {node}" for node in (*candidates.faults, *candidates.impostors, *gone)
        }
        return candidates.summaries

    def _receive(self, node: int, summary: dict[str, Any], server_round: int) -> None:
        """Admit a node whose silo belongs to the run, keep a late joiner until its round, or report why not."""
        name = self.registration.nodes[node] = summary["name"]
        known = self.registration.silos.get(name)
        if known is not None and known.node_id == OFFLINE:
            self._return(node, summary, server_round)
        elif known is not None:
            self.reporter.note(self._second(name, node))
        elif name in self.common.held_out or not self.late.allows(name):
            self.reporter.note(f"{name} is here, and is none of this run's silos")
        elif reason := self.registration.misfit(summary):
            self.registration.leave_out(name, f"{name} cannot join the run: it has {reason}")
        else:
            self.late.wait(name, node, summary)

    def _second(self, name: str, node: int) -> str:
        """Return the reason why a node that uses the name of a silo of this run does not take part."""
        known = self.registration.keys.get(name)
        if known and self.requests.identities.key(node) != known:
            return f"{name} is here with another key than this run knows it by: it takes part in new runs only"
        return f"a second node calls itself {name}, which takes part already: it does not"

    def _return(self, node: int, summary: dict[str, Any], server_round: int) -> None:
        """Admit a silo that was offline; it continues from its own state."""
        name = summary["name"]
        if self.registration.misfit(summary):
            self.reporter.note(
                f"{name} is back with other data than before, and cannot take part in this run"
            )
            return
        self.registration.enter(node, summary)
        self.reporter.note(f"{name} is back, and takes part from round {server_round} on")

    def _join(self, name: str, joiner: Joiner, server_round: int) -> None:
        """Admit a hospital that was not among the run's silos."""
        del self.late.waiting[name]
        if len(self.registration.silos) + len(self.registration.held_out) >= self.common.silos:
            silos = f"silos = {self.common.silos}"
            self.registration.leave_out(
                name, f"{name} cannot join the run, which has {silos} and so many already"
            )
            return
        summary = {k: v for k, v in joiner.summary.items() if k not in SUMS}
        if reason := self.registration.misfit(summary):
            self.registration.leave_out(name, f"{name} cannot join the run: it has {reason}")
            return
        self.registration.enter(joiner.node, summary)
        self.registration.joined[name] = server_round
        weights = RoundPlan().with_silos(self.registration.silos.values(), self.common).samples
        counts = (
            f"; it counts as {n} samples" if (n := weights[name]) != summary["n_train"] else ""
        )
        self.reporter.note(
            f"{name} joins the run, and takes part from round {server_round} on{counts}"
        )

    def take_back(self, done: int) -> None:
        """Remove the silos that joined after round ``done``, to which the run goes back; they join again."""
        registration = self.registration
        for name, first in list(registration.joined.items()):
            if first > done:
                self.late.wait(
                    name,
                    registration.silos.pop(name).node_id,
                    registration.summaries.pop(name),
                    first,
                )
                del registration.joined[name]
