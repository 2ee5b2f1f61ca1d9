"""Requests for the nodes' data summaries; nodes with a valid summary and name are admitted.

Identity registry: each silo name is bound to a key.

A silo sends its name in its data summary. The operator has registered the name with the node's public key at the
SuperLink (`silofl up`, `setup`, `silofl add-silo`). The SuperLink authenticates nodes by their private keys. Flower's
`Grid.get_nodes` returns names and public keys to the ServerApp, so no silo can change this table. A checkpoint
holds the silos' keys, so a silo needs the same key in a resumed run.

Without registered names (a simulation; a SuperLink without node keys) names are not checked.

Hospitals that join a run after it has begun (the setting ``late-joiners``).

A hospital joins between two rounds. Schema, standardisation and classes of the run do not change: a hospital whose data
do not fit is left out, and its sums of columns are not requested. The method defines its initial state and the change
of the others' states (``PersonalizedStrategy.welcome``, ``grow``). A run has at most ``silos`` hospitals.
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

from client.flower.messages import CRASHED, UNREACHABLE, is_error
from client.protocol.envelope import fingerprint
from partitions.common.errors import DataError, RunFailedError, UserError
from server.results.reasons import merge_reasons
from server.run.exchange import Exchange, TimeoutPolicy
from server.run.limits import SUMMARY_BYTES, check_reply
from server.run.receipts import Receipts
from server.run.reporter import Reporter
from strategies.base.newcomers import ANY
from strategies.base.settings import Common
from strategies.base.transport.reporting import printable, read_data_summary, reason_of


class ImpostorError(UserError):
    """Error: a silo uses a name that is registered for another key."""


@dataclass
class IdentityRegistry:
    """Registry of node names and keys."""

    known: Mapping[str, str] = field(default_factory=dict)  # the keys of a resumed run's silos
    # Flower's NodeInfo by node id: name and public key as registered
    nodes: dict[int, Any] = field(default_factory=dict)
    warned: bool = False
    # Of all nodes so far, where names are registered
    names: dict[int, str] = field(default_factory=dict)

    def update(self, nodes: Iterable[Any]) -> list[int]:
        """Set the nodes that are online, and return their ids."""
        self.nodes = {node.node_id: node for node in nodes}
        if self.has_keys and not self.has_names and not self.warned:
            log(
                WARNING,
                "the silos' keys are registered without names: a silo may call itself what it likes",
            )
            self.warned = True
        if self.has_names:
            self.names |= {node: self.registered_name(node) for node in self.nodes}
        return sorted(self.nodes)

    @property
    def has_names(self) -> bool:
        """Whether names are registered here."""
        return any(node.name for node in self.nodes.values())

    @property
    def has_keys(self) -> bool:
        """Whether nodes have keys; the nodes of a simulation have none."""
        return any(node.public_key.startswith(b"-----BEGIN") for node in self.nodes.values())

    def registered_name(self, node_id: int) -> str:
        """Return the name registered for a node's key, or the node's id."""
        node = self.nodes.get(node_id)
        return str(node.name) if node and node.name else f"node {node_id}"

    def key(self, node_id: int) -> str:
        """Return the fingerprint of a node's key; empty if it is registered without a name."""
        node = self.nodes[node_id]
        return fingerprint(node.public_key) if node.name else ""

    def check(self, node_id: int, name: str) -> None:
        """Raise ImpostorError unless the node may use this name."""
        registered = self.nodes[node_id].name
        if registered and registered != name:
            raise ImpostorError(
                f"node {node_id} calls itself {name}, and its key is registered as {registered}"
            )
        if not registered and (self.has_names or self.known.get(name)):
            raise ImpostorError(
                f"node {node_id} calls itself {name}, and its key is registered without a name: remove it and "
                f"`silofl add-silo {name}`"
            )
        before = self.known.get(name, "")
        if before and before != self.key(node_id):
            raise ImpostorError(
                f"node {node_id} calls itself {name}, whose key was another one when this run began ({before}, now "
                f"{self.key(node_id)}): it takes part in new runs only"
            )


JOIN_SECONDS = 60.0  # how long a round waits for the data summary of a new node


@dataclass(frozen=True)
class Joiner:
    """A hospital that is online and not yet among the run's silos."""

    node: int
    summary: Mapping[str, Any]
    first: int  # the earliest round in which it takes part


class LateJoiners:
    """The hospitals that may join one run late."""

    def __init__(self, common: Common) -> None:
        self.common = common
        self.waiting: dict[str, Joiner] = {}

    @property
    def expected(self) -> int:
        """The number of silos that a new run waits for; the quorum, if there is one and every silo may join late."""
        if self.common.late_joiners == ANY and self.common.min_silos:
            return self.common.min_silos
        return self.common.silos - len(self.common.late)

    def allows(self, name: str) -> bool:
        """Return whether a hospital may join during the run."""
        return self.common.late_joiners == ANY or name in self.common.late

    def is_late(self, name: str, before: Mapping[str, Any]) -> bool:
        """Return whether a hospital that is online does not take part yet. ``before``: the silos of a resumed run."""
        return (
            name not in before
            if before and self.allows(name)
            else name in self.common.late and not before
        )

    def wait(self, name: str, node: int, summary: Mapping[str, Any], first: int = 0) -> None:
        """Keep a hospital until its round."""
        self.waiting[name] = Joiner(node, summary, first or self.common.late.get(name, 0))

    def due(self, server_round: int) -> dict[str, Joiner]:
        """Return the hospitals that may join in this round, by name."""
        return {
            name: joiner
            for name, joiner in sorted(self.waiting.items())
            if joiner.first <= server_round
        }

    def awaits(self, silos: Mapping[str, Any]) -> bool:
        """Return whether a hospital other than the run's ``silos`` may still join."""
        return bool(self.common.late.keys() - silos.keys()) or self.common.late_joiners == ANY


LOOK_SECONDS = (0.05, 0.5)  # first and longest pause between two looks for silos
SUMMARY_SECONDS = 300.0  # time limit for a data summary
# Number of requests to a silo whose process dies while it computes the summary
SUMMARY_TRIES = 3


@dataclass
class Candidates:
    """Nodes that answered, by id: data summaries, faults, and nodes refused for their name."""

    summaries: dict[int, dict[str, Any]] = field(default_factory=dict)
    faults: dict[int, str] = field(default_factory=dict)
    impostors: dict[int, str] = field(default_factory=dict)
    # Nodes without a data summary within the time limit
    silent: list[int] = field(default_factory=list)

    def __contains__(self, node: int) -> bool:
        return node in self.summaries or node in self.faults or node in self.impostors


@dataclass
class SummaryRequests:
    """Requests for data summaries in one run, with the record of the nodes' identities and crashes."""

    grid: Grid
    common: Common
    reporter: Reporter
    receipts: Receipts
    late: LateJoiners
    identities: IdentityRegistry
    # Silo that is not in the resumed run -> message
    strangers: dict[str, str] = field(default_factory=dict)
    # Node -> requests that ended in a crash or without a reply
    crashes: Counter[int] = field(default_factory=Counter)

    def nodes(self) -> list[int]:
        """Return the ids of the nodes that are online."""
        return self.identities.update(self.grid.get_nodes())

    def wait(self, candidates: Candidates, before: Mapping[str, Any]) -> list[int]:
        """Request summaries until all expected silos have answered, or the time is up; return the nodes.

        ``before``: the silos of the resumed run. Raises UserError if too many nodes have a fault, RunFailedError if
        the time is up without a quorum.
        """
        expected = len(before) + len(self.common.held_out) if before else self.late.expected
        deadline = time.monotonic() + self.common.round_timeout
        announced, pause = -1, LOOK_SECONDS[0]
        while True:
            online, complete = self._ask_all(candidates, before)
            self._check_faults(candidates, len(online), expected, complete)
            strangers = 0 if self.identities.has_keys else len(self.strangers)
            if len(online) + len(candidates.faults) + strangers >= expected:
                return online
            if time.monotonic() > deadline:
                if not 0 < self.common.min_silos <= len(online):
                    raise RunFailedError(self._timed_out(candidates, expected))
                log(WARNING, "goes on with %d of %d silos", len(online), expected)
                return online
            if len(online) != announced:
                self.reporter.transfer(
                    f"{len(online)} of {expected} silos are here, and the run waits: silofl status (of containers: "
                    "silofl doctor federation.yaml) shows who is online"
                )
                announced = len(online)
            time.sleep(pause)
            pause = min(pause * 1.5, LOOK_SECONDS[1])

    def _ask_all(
        self, candidates: Candidates, before: Mapping[str, Any]
    ) -> tuple[list[int], bool]:
        """Query the nodes that have not answered; return the nodes that may begin, and whether no others can come."""
        nodes = self.nodes()
        self.ask([n for n in nodes if n not in candidates], candidates, before)
        # An impostor does not take a silo's place
        nodes = [n for n in nodes if n not in candidates.impostors]
        answered = [n for n in nodes if n in candidates.summaries]
        online = [
            n
            for n in answered
            if not self.late.is_late(candidates.summaries[n]["name"], before)
        ]
        a_simulation = not self.identities.has_keys  # its set of nodes never grows
        return online, a_simulation and len(answered) + len(candidates.faults) == len(nodes)

    def _check_faults(
        self, candidates: Candidates, online: int, expected: int, complete: bool
    ) -> None:
        """Raise UserError if so many nodes have a fault that the required number of silos cannot be reached."""
        needed = self.common.min_silos or 1
        faults = len(candidates.faults)
        too_many = expected - faults < needed or (
            complete and faults and not self.common.min_silos
        )
        if online < needed and too_many:
            raise UserError("; ".join(merge_reasons(by_node(candidates.faults))))

    def _timed_out(self, candidates: Candidates, expected: int) -> str:
        names = ", ".join(sorted(c["name"] for c in candidates.summaries.values())) or "none"
        reasons = merge_reasons(by_node({**candidates.impostors, **candidates.faults}))
        refused = "".join(f"; refused: {reason}" for reason in reasons)
        waited = f"waited {self.common.round_timeout:g} s for {expected} silos"
        return f"{waited}; here are {len(candidates.summaries)}: {names}{refused}"

    def ask(
        self,
        nodes: Sequence[int],
        candidates: Candidates,
        before: Mapping[str, Any] | None = None,
        *,
        late: bool = False,
    ) -> None:
        """Request data summaries; add each one to ``candidates``, or the reason why a node has none.

        An unreachable node, or one whose process died (out of memory, killed), is asked again later. ``before``: the
        silos of the resumed run, if any; other silos take part in new runs only. ``late``: the run has begun.
        """
        questions = [_message(node, late=late) for node in nodes]
        policy = TimeoutPolicy(JOIN_SECONDS if late else SUMMARY_SECONDS)
        exchange = Exchange(
            self.grid, policy, most=lambda _: SUMMARY_BYTES, receipts=self.receipts
        )
        replies = sorted(
            exchange.run(questions) if questions else [],
            key=lambda reply: reply.metadata.src_node_id,
        )
        candidates.silent = sorted({*nodes} - {reply.metadata.src_node_id for reply in replies})
        for reply in replies:
            node = reply.metadata.src_node_id
            if not reply.has_error():
                self._admit(node, reply.content, candidates, before)
                continue
            reason, crashed = reason_of(reply.error.reason), is_error(reply, CRASHED)
            if is_error(reply, *UNREACHABLE) or (crashed and self.may_crash(node)):
                log(WARNING, "a silo (node %d) gave no data summary yet: %s", node, reason)
            else:
                self.reporter.silo_fault(f"node {node}", reason)
                candidates.faults[node] = _cannot_take_part(node, reason)

    def may_crash(self, node: int) -> bool:
        """Count a crash of a node's process; return whether the node is asked again."""
        self.crashes[node] += 1
        return self.crashes[node] < SUMMARY_TRIES

    def _admit(
        self,
        node: int,
        content: RecordDict,
        candidates: Candidates,
        before: Mapping[str, Any] | None,
    ) -> None:
        """Check a node's data summary and its name; add the summary or the fault to ``candidates``."""
        try:
            check_reply(content, ("summary",), SUMMARY_BYTES)
            summary = read_data_summary(content.get("summary"))
            self.identities.check(node, name := summary["name"])
            if (
                before
                and name not in (*before, *self.common.held_out)
                and not self.late.allows(name)
            ):
                self.strangers[name] = candidates.impostors[node] = (
                    f"{name} is here, and is none of this run's silos"
                )
                self.reporter.note(candidates.impostors[node])
                return
            for other, known in candidates.summaries.items():
                if known["name"] == name and other in self.identities.nodes:
                    raise UserError(
                        f"it is called {name}, as node {other} is: give each its own `name`"
                    )
        except ImpostorError as error:
            candidates.impostors[node] = str(error)
            self.reporter.log_refused(str(error))
            return
        except (UserError, DataError) as error:
            candidates.faults[node] = _cannot_take_part(node, str(error))
            return
        candidates.summaries[node] = summary
        shown = (summary[key] for key in ("n_train", "shape", "device", "versions"))
        log(INFO, "%s: %d training samples, shape %s, %s, %s", name, *shown)


def by_node(reasons: Mapping[int, str]) -> list[tuple[str, str]]:
    """Return reasons with the names of nodes that have no other."""
    return [(f"node {node}", reason) for node, reason in reasons.items()]


def _message(node: int, *, late: bool) -> Message:
    """Return the request for a node's data summary. ``late``: the run has begun."""
    content = RecordDict({"config": ConfigRecord({"late": True} if late else {})})
    return Message(
        content, dst_node_id=node, message_type=MessageType.QUERY, ttl=SUMMARY_SECONDS
    )


def _cannot_take_part(node: int, reason: str) -> str:
    """Return a one-line message on a node that cannot take part."""
    return printable(f"a silo (node {node}) cannot take part: {reason}")
