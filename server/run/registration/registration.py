"""Client registration: ask each silo for its data summary, and leave out silos that do not fit the others.

All silos register before the first round. Later, silos that were offline when the run was resumed may come back, and
others join where the setting ``late-joiners`` lets them (``late_joiners.py``).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from logging import INFO, WARNING
from typing import Any

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.common import log
from flwr.serverapp import Grid

from models.shapes import read_shape
from models.tasks import Task, task_of
from partitions.common.errors import DataError, RunFailedError, UserError
from server.run.exchange import CRASHED, UNREACHABLE, Exchange, TimeoutPolicy
from server.run.limits import SUMMARY_BYTES, check_reply
from server.run.receipts import Receipts
from server.run.registration.identities import IdentityRegistry, ImpostorError
from server.run.registration.late_joiners import JOIN_SECONDS, Joiner, LateJoiners
from server.run.registration.notes import note_silos
from server.run.reporter import Reporter
from strategies.base.newcomer.server import join
from strategies.base.run_settings import RunSettings
from strategies.base.schema.data_summary import (
    SUMS,
    DataSpec,
    Summary,
    declared_spec,
    misfit,
    read_agreed,
    read_data_spec,
    reconcile,
)
from strategies.base.schema.reporting import is_refusal, printable, read_data_summary, reason_of
from strategies.base.state import State
from strategies.base.strategy import AWAY, PersonalizedStrategy, SiloInfo

SUMMARY_SECONDS = 300.0  # how long a silo may take over its data summary
SUMMARY_TRIES = 3  # times that a silo is asked for it whose process dies over it


@dataclass
class Candidates:
    """The nodes that answered, by id: data summaries, faults, and nodes refused for their name."""

    summaries: dict[int, dict[str, Any]] = field(default_factory=dict)
    faults: dict[int, str] = field(default_factory=dict)
    impostors: dict[int, str] = field(default_factory=dict)
    silent: list[int] = field(default_factory=list)  # nodes whose time for their data summary was up

    def __contains__(self, node: int) -> bool:
        return node in self.summaries or node in self.faults or node in self.impostors


class Registration:
    """The silos of one run: their data summaries, names and keys, and which are left out."""

    def __init__(self, grid: Grid, settings: RunSettings, reporter: Reporter, receipts: Receipts | None = None) -> None:
        self.grid, self.common, self.reporter = grid, settings.common, reporter
        self.receipts = receipts or Receipts()
        self.trains = settings.strategy.info.trains
        self.summaries: dict[str, dict[str, Any]] = {}
        self.data_spec = DataSpec(True, (), 1)
        self.held_out: dict[str, SiloInfo] = {}  # the hospitals that the run holds out, and that are here
        self.left_out: dict[str, str] = {}  # silos, or nodes, that do not take part, and why
        self.faulty: dict[int, str] = {}  # nodes that answered with an error; they are asked again
        self.strangers: dict[str, str] = {}  # silos that the resumed run does not have
        self.late = LateJoiners(settings.common)
        self.crashes: Counter[int] = Counter()  # how often a node has died, or was silent, over its data summary
        self.identities = IdentityRegistry()
        self.keys: dict[str, str] = {}  # the fingerprint of each silo's key, where it is registered under its name
        self.nodes: dict[int, str] = {}  # the names of the nodes that take part, or may not

    @property
    def task(self) -> Task:
        """The task that all silos train on."""
        return task_of(self.data_spec.task)

    @property
    def needed(self) -> int:
        """The number of silos needed to begin; silos that cannot take part are not waited for."""
        return self.common.min_silos or 1

    @property
    def simulated(self) -> bool:
        """Whether all silos are simulated."""
        return all(summary["simulated"] for summary in self.summaries.values())

    def name_of(self, node: int) -> str:
        """Return a node's name, or its number."""
        return self.nodes.get(node, f"node {node}")

    def register(self, saved: State | None = None) -> list[SiloInfo]:
        """Wait for the silos, ask each for its data summary, and leave out those that do not fit the others.

        ``saved``: the checkpoint of the resumed run; its silos are expected, and what they agreed on holds.
        """
        self.keys = dict(saved.numbers.get("keys", {})) if saved else {}
        self.identities = IdentityRegistry(self.keys)
        found = Candidates()
        before: dict[str, dict[str, Any]] = saved.numbers.get("cards", {}) if saved else {}
        online = self._wait(found, before)
        for n, summary in found.summaries.items():
            if self.late.is_late(name := summary["name"], before):
                self.late.wait(name, n, summary)
        summaries = {found.summaries[n]["name"]: found.summaries[n] for n in online}
        held = {name: summaries.pop(name) for name in self.common.held_out if name in summaries}
        self._agree(summaries, found.faults, saved)
        self.faulty = found.faults
        nodes_of = {found.summaries[n]["name"]: n for n in online}
        self.nodes = {n: self.identities.registered_name(n) for n in (*found.faults, *found.impostors)}
        self.nodes |= {n: summary["name"] for n, summary in found.summaries.items()}
        self.keys |= {name: key for name in self.summaries if (key := self.identities.key(nodes_of[name]))}
        if self.trains:
            note_silos(self.summaries, self.data_spec, self.common, self.reporter)
        self._hold_out(held, nodes_of)
        self._check_late()
        return [silo_info(summary, nodes_of[name]) for name, summary in self.summaries.items()]

    def _hold_out(self, held: Mapping[str, Mapping[str, Any]], nodes_of: Mapping[str, int]) -> None:
        """Set the held-out hospitals, which nothing was agreed with, and report those that do not fit or are not here.

        Raises UserError for a name that no silo of a simulation has.
        """
        for name in self.common.held_out:
            if name not in held and self.simulated:
                raise UserError(f"hold-out = {self.common.hold_out}: there is no silo {name!r}")
            spec = self.data_spec.values
            fault = misfit(held[name], spec, "the others have") if name in held else "it is not here"
            if fault:
                self._leave_out(name, f"{name}, which is held out, is not evaluated: {fault}")
            else:
                self.held_out[name] = silo_info(held[name], nodes_of[name])

    def _check_late(self) -> None:
        """Raise UserError where ``late-joiners`` names a hospital that no silo of a simulation has."""
        for name in self.common.late:
            if self.simulated and name not in {**self.late.waiting, **self.summaries}:
                raise UserError(f"late-joiners = {self.common.late_joiners}: there is no silo {name!r}")

    def _wait(self, found: Candidates, before: Mapping[str, Any]) -> list[int]:
        """Ask nodes until all expected silos have answered, or a quorum has and the time is up; return the nodes."""
        c = self.common
        expected = len(before) + len(c.held_out) if before else self.late.expected
        deadline = time.monotonic() + self.common.round_timeout
        announced = -1
        while True:
            nodes = self.identities.update(self.grid.get_nodes())
            self.ask_summaries([n for n in nodes if n not in found], found, before)
            nodes = [n for n in nodes if n not in found.impostors]  # whose places are still free
            answered = [n for n in nodes if n in found.summaries]
            online = [n for n in answered if not self.late.is_late(found.summaries[n]["name"], before)]
            faults = len(found.faults)
            complete = not self.identities.has_keys and len(answered) + faults == len(nodes)  # a simulation never grows
            too_many_faults = expected - faults < self.needed or (complete and faults and not self.common.min_silos)
            if len(online) < self.needed and too_many_faults:
                raise UserError("; ".join(dict.fromkeys(found.faults.values())))
            strangers = 0 if self.identities.has_keys else len(self.strangers)
            if len(online) + faults + strangers >= expected:
                return online
            if time.monotonic() > deadline:
                if 0 < self.common.min_silos <= len(online):
                    log(WARNING, "goes on with %d of %d silos", len(online), expected)
                    return online
                raise RunFailedError(self._timed_out(found, expected))
            if len(online) != announced:
                log(INFO, "%d of %d silos are here", len(online), expected)
                announced = len(online)
            time.sleep(0.5)

    def _timed_out(self, found: Candidates, expected: int) -> str:
        names = ", ".join(sorted(c["name"] for c in found.summaries.values())) or "none"
        refused = "".join(f"; refused: {reason}" for reason in [*found.impostors.values(), *found.faults.values()])
        waited = f"waited {self.common.round_timeout:g} s for {expected} silos"
        return f"{waited}; here are {len(found.summaries)}: {names}{refused}"

    def ask_summaries(
        self, nodes: Sequence[int], found: Candidates, before: Mapping[str, Any] | None = None, *, late: bool = False
    ) -> None:
        """Add these nodes' data summaries to ``found``, or the reason why a node has none.

        A node that is not reachable, or whose process died (out of memory, killed), is asked again later. ``before``:
        the silos of the resumed run, if there is one; other silos take part in new runs only. ``late``: it has begun.
        """
        asked = [summary_message(node, late=late) for node in nodes]
        policy = TimeoutPolicy(JOIN_SECONDS if late else SUMMARY_SECONDS)
        exchange = Exchange(self.grid, policy, most=lambda _: SUMMARY_BYTES, receipts=self.receipts)
        replies = sorted(exchange.run(asked) if asked else [], key=lambda reply: reply.metadata.src_node_id)
        found.silent = sorted({*nodes} - {reply.metadata.src_node_id for reply in replies})
        for reply in replies:
            node = reply.metadata.src_node_id
            if not reply.has_error():
                self._admit(node, reply.content, found, before)
            elif reply.error.code in UNREACHABLE or (reply.error.code == CRASHED and self._may_crash(node)):
                log(WARNING, "a silo (node %d) gave no data summary yet: %s", node, reason_of(reply.error.reason))
            else:
                reason = reason_of(reply.error.reason)
                self.reporter.silo_fault(f"node {node}", reason)
                found.faults[node] = cannot_take_part(node, reason)

    def _admit(self, node: int, content: RecordDict, found: Candidates, before: Mapping[str, Any] | None) -> None:
        """Check a node's data summary and its name, and add it to ``found``."""
        try:
            check_reply(content, ("summary",), SUMMARY_BYTES)
            summary = read_data_summary(content.get("summary"))
            self.identities.check(node, name := summary["name"])
            if before and name not in (*before, *self.common.held_out) and not self.late.allows(name):
                self.strangers[name] = found.impostors[node] = f"{name} is here, and is none of this run's silos"
                self.reporter.note(found.impostors[node])
                return
            for other in (n for n, c in found.summaries.items() if c["name"] == name and n in self.identities.nodes):
                raise UserError(f"it is called {name}, as node {other} is: give each its own `name`")
        except ImpostorError as error:
            found.impostors[node] = str(error)
            self.reporter.refused(str(error))
            return
        except (UserError, DataError) as error:
            found.faults[node] = cannot_take_part(node, str(error))
            return
        found.summaries[node] = summary
        shown = (summary[key] for key in ("n_train", "shape", "device", "versions"))
        log(INFO, "%s: %d training samples, shape %s, %s, %s", name, *shown)

    def _may_crash(self, node: int) -> bool:
        """Count a crash of a node's process, and return whether the node is asked again."""
        self.crashes[node] += 1
        return self.crashes[node] < SUMMARY_TRIES

    def _agree(self, summaries: Mapping[str, Summary], faults: Mapping[int, str], saved: State | None) -> None:
        """Set what holds for all silos, and report those left out. Raises UserError where no quorum is left."""
        known, source = declared_spec(read_agreed(self.common.agreed)), "the federation file has"
        if saved is not None:  # an older checkpoint has data summaries alone
            known = saved.numbers.get("facts") or data_spec_of(saved.numbers["cards"].values())
            source = "this run has"
        sums = self.common.normalization == "agreed"
        found = reconcile(list(summaries.values()), read_data_spec(known), source, sums=sums)
        self.left_out = {self.identities.registered_name(node): fault for node, fault in faults.items()}
        self.left_out |= found.left_out
        if len(found.summaries) < self.needed:
            raise UserError("; ".join(dict.fromkeys(self.left_out.values())))
        for reason in self.left_out.values():
            self.reporter.note(reason)
        self.left_out |= self.strangers  # already reported
        self.data_spec, self.summaries = found.data_spec, found.summaries

    def absent(self, saved: State | None) -> list[SiloInfo]:
        """Return the checkpoint's silos that are offline, where a quorum is online: the run goes on without them.

        Their data summaries are the checkpoint's, so that what all silos agreed on stays as it was.
        """
        if saved is None:
            return []
        saved_summaries: dict[str, dict[str, Any]] = saved.numbers.get("cards", {})
        offline = {n: s for n, s in saved_summaries.items() if n not in self.summaries and not s["simulated"]}
        faulty = len(self.left_out) - len(self.strangers)  # silos left out are not waited for
        if not self.common.min_silos and len(offline) > faulty:
            return []
        self.summaries = dict(sorted({**self.summaries, **offline}.items()))
        return [silo_info(summary, AWAY) for summary in offline.values()]

    def readmit(self, strategy: PersonalizedStrategy, server_round: int) -> None:
        """Admit silos that were offline, or had a fault, when the run was resumed, and those that join it late.

        They take part from this round on. A node that answers with an error is asked again in the next round.
        """
        offline = {name for name, info in strategy.silos.items() if info.node_id == AWAY}
        if offline or self.late.awaited(strategy.silos):
            for node, summary in self._newly_online().items():
                name = self.nodes[node] = summary["name"]
                if name in offline:
                    self._return(strategy, node, summary, server_round)
                elif name in strategy.silos:
                    self.reporter.note(self._second(name, node))
                elif name in self.common.held_out or not self.late.allows(name):
                    self.reporter.note(f"{name} is here, and is none of this run's silos")
                elif reason := self._misfit(summary):
                    self._leave_out(name, f"{name} cannot join the run: it has {reason}")
                else:
                    self.late.wait(name, node, summary)
        if due := self.late.due(server_round):
            self.identities.update(self.grid.get_nodes())
        for name, joiner in due.items():
            if joiner.node in self.identities.nodes:  # or else it joins once it is here again
                self._join(strategy, name, joiner, server_round)

    def _second(self, name: str, node: int) -> str:
        """Return why a node does not take part that has the name of a silo of this run."""
        if self.keys.get(name) and self.identities.key(node) != self.keys[name]:
            return f"{name} is here with another key than this run knows it by: it takes part in new runs only"
        return f"a second node calls itself {name}, which takes part already: it does not"

    def _newly_online(self) -> dict[int, dict[str, Any]]:
        """Return the data summaries of nodes that have come, or had a fault, and give one now; report the others."""
        again = {node for node, reason in self.faulty.items() if not is_refusal(reason)}
        new = [n for n in self.identities.update(self.grid.get_nodes()) if n not in self.nodes or n in again]
        found = Candidates()
        self.ask_summaries(new, found, late=True)
        for node, reason in found.faults.items():
            if self.faulty.get(node) != reason:
                self.reporter.note(reason)
        self.faulty = found.faults
        gone = [node for node in found.silent if not self._may_crash(node)]
        for node in gone:
            self.reporter.note(
                f"a silo (node {node}) gave no data summary within {JOIN_SECONDS:g} s, {SUMMARY_TRIES} times"
            )
        self.nodes |= {node: f"node {node}" for node in (*found.faults, *found.impostors, *gone)}
        return found.summaries

    def _return(self, strategy: PersonalizedStrategy, node: int, summary: dict[str, Any], server_round: int) -> None:
        """Admit a silo that was offline, which goes on with its state."""
        name = summary["name"]
        if self._misfit(summary):
            self.reporter.note(f"{name} is back with other data than before, and cannot take part in this run")
            return
        self._enter(node, summary)
        strategy.silos[name] = silo_info(summary, node)
        strategy.weigh()
        self.reporter.note(f"{name} is back, and takes part from round {server_round} on")

    def _join(self, strategy: PersonalizedStrategy, name: str, joiner: Joiner, server_round: int) -> None:
        """Admit a hospital that was none of the run's silos."""
        del self.late.waiting[name]
        if len(strategy.silos) + len(self.held_out) >= self.common.silos:
            silos = f"silos = {self.common.silos}"
            self._leave_out(name, f"{name} cannot join the run, which has {silos} and so many already")
            return
        summary = {k: v for k, v in joiner.summary.items() if k not in SUMS}
        if reason := self._misfit(summary):
            self._leave_out(name, f"{name} cannot join the run: it has {reason}")
            return
        self._enter(joiner.node, summary)
        join(strategy, silo_info(summary, joiner.node), server_round)
        counts = f"; it counts as {n} samples" if (n := strategy.samples[name]) != summary["n_train"] else ""
        self.reporter.note(f"{name} joins the run, and takes part from round {server_round} on{counts}")

    def _misfit(self, summary: Summary) -> str:
        """Return what a silo has that does not fit what the run's silos agreed on; empty where all does."""
        return misfit(summary, self.data_spec.values, "this run has")

    def _leave_out(self, name: str, reason: str) -> None:
        self.left_out[name] = reason
        self.reporter.note(reason)

    def _enter(self, node: int, summary: dict[str, Any]) -> None:
        name = summary["name"]
        self.nodes[node] = name
        self.summaries = dict(sorted({**self.summaries, name: summary}.items()))
        for known in (name, self.identities.registered_name(node)):
            self.left_out.pop(known, None)
        if key := self.identities.key(node):
            self.keys[name] = key

    def take_back(self, strategy: PersonalizedStrategy, done: int) -> None:
        """Take out the silos that joined after round ``done``, to which the run goes back; they join again."""
        for name, first in list(strategy.joined.items()):
            if first > done:
                self.late.wait(name, strategy.silos.pop(name).node_id, self.summaries.pop(name), first)
                del strategy.joined[name]
        strategy.weigh()


def summary_message(node: int, *, late: bool = False) -> Message:
    """Return the message that asks a node for its data summary. ``late``: for a run that goes on."""
    content = RecordDict({"config": ConfigRecord({"late": True} if late else {})})
    return Message(content, dst_node_id=node, message_type=MessageType.QUERY, ttl=SUMMARY_SECONDS)


def cannot_take_part(node: int, reason: str) -> str:
    """Return one printable line on a node that cannot take part."""
    return printable(f"a silo (node {node}) cannot take part: {reason}")


def silo_info(summary: Mapping[str, Any], node: int) -> SiloInfo:
    """Return a silo's name, node and sample counts."""
    return SiloInfo(summary["name"], node, summary["n_train"], summary["n_val"], summary["n_test"])


def data_spec_of(summaries: Iterable[Summary]) -> dict[str, Any]:
    """Return what these data summaries agreed on, for a checkpoint that does not hold them."""
    summaries = list(summaries)
    own_file, classes = any(s["own_file"] for s in summaries), max(s["classes"] for s in summaries)
    shape, task = read_shape(summaries[0]["shape"]), summaries[0].get("task", "multiclass")
    return DataSpec(own_file, shape, classes, task).saved()
