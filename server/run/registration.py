"""Client registration: ask each silo for its data summary, and leave out silos that do not fit the others.

All silos register before the first round. Later, silos that were offline when the run was resumed may come back.
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
from server.run.identities import IdentityRegistry, ImpostorError
from server.run.limits import CARD_BYTES, check_reply
from server.run.receipts import Receipts
from server.run.registration_notes import note_silos
from server.run.reporter import Reporter
from strategies.base.run_settings import RunSettings
from strategies.base.schema.data_summary import Facts, declared_facts, judge, misfit, read_agreed, read_facts
from strategies.base.schema.reporting import is_refusal, printable, read_card, reason_of
from strategies.base.state import State
from strategies.base.strategy import AWAY, PersonalizedStrategy, SiloInfo

CARD_SECONDS = 300.0  # how long a silo may take over its data summary
CARD_TRIES = 3  # times that a silo is asked for it whose process dies over it


@dataclass
class Candidates:
    """The nodes that answered, by id: data summaries, faults, and nodes refused for their name."""

    cards: dict[int, dict[str, Any]] = field(default_factory=dict)
    faults: dict[int, str] = field(default_factory=dict)
    impostors: dict[int, str] = field(default_factory=dict)

    def __contains__(self, node: int) -> bool:
        return node in self.cards or node in self.faults or node in self.impostors


class Registration:
    """The silos of one run: their data summaries, names and keys, and which are left out."""

    def __init__(self, grid: Grid, settings: RunSettings, reporter: Reporter, receipts: Receipts | None = None) -> None:
        self.grid, self.common, self.reporter = grid, settings.common, reporter
        self.receipts = receipts or Receipts()
        self.trains = settings.strategy.info.trains
        self.cards: dict[str, dict[str, Any]] = {}
        self.facts = Facts(True, (), 1)
        self.held_out: dict[str, SiloInfo] = {}  # the hospitals that the run holds out, and that are here
        self.left_out: dict[str, str] = {}  # silos, or nodes, that do not take part, and why
        self.faulty: dict[int, str] = {}  # nodes that answered with an error; they are asked again
        self.strangers: dict[str, str] = {}  # silos that the resumed run does not have
        self.crashes: Counter[int] = Counter()  # how often a node's process has died over its data summary
        self.identities = IdentityRegistry()
        self.keys: dict[str, str] = {}  # the fingerprint of each silo's key, where it is registered under its name
        self.nodes: dict[int, str] = {}  # the names of the nodes that take part, or may not

    @property
    def task(self) -> Task:
        """The task that all silos train on."""
        return task_of(self.facts.task)

    @property
    def needed(self) -> int:
        """The number of silos needed to begin; silos that cannot take part are not waited for."""
        return self.common.min_silos or 1

    @property
    def simulated(self) -> bool:
        """Whether all silos are simulated."""
        return all(card["simulated"] for card in self.cards.values())

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
        cards = {found.cards[n]["name"]: found.cards[n] for n in online}
        held = {name: cards.pop(name) for name in self.common.held_out if name in cards}
        self._agree(cards, found.faults, saved)
        self.faulty = found.faults
        nodes_of = {found.cards[n]["name"]: n for n in online}
        self.nodes = {n: self.identities.registered_name(n) for n in (*found.faults, *found.impostors)}
        self.nodes |= {n: found.cards[n]["name"] for n in online}
        self.keys |= {name: key for name in self.cards if (key := self.identities.key(nodes_of[name]))}
        if self.trains:
            note_silos(self.cards, self.facts, self.common, self.reporter)
        self._hold_out(held, nodes_of)
        return [silo_info(card, nodes_of[name]) for name, card in self.cards.items()]

    def _hold_out(self, held: Mapping[str, Mapping[str, Any]], nodes_of: Mapping[str, int]) -> None:
        """Set the held-out hospitals, which nothing was agreed with, and report those that do not fit or are not here.

        Raises UserError for a name that no silo of a simulation has.
        """
        for name in self.common.held_out:
            if name not in held and self.simulated:
                raise UserError(f"hold-out = {self.common.hold_out}: there is no silo {name!r}")
            fault = "it is not here" if name not in held else misfit(held[name], self.facts.values, "the others have")
            if fault:
                self.left_out[name] = f"{name}, which is held out, is not evaluated: {fault}"
                self.reporter.note(self.left_out[name])
            else:
                self.held_out[name] = silo_info(held[name], nodes_of[name])

    def _wait(self, found: Candidates, before: Mapping[str, Any]) -> list[int]:
        """Ask nodes until all expected silos have answered, or a quorum has and the time is up; return the nodes."""
        expected = len(before) + len(self.common.held_out) if before else self.common.silos
        deadline = time.monotonic() + self.common.round_timeout
        announced = -1
        while True:
            nodes = self.identities.update(self.grid.get_nodes())
            self.ask_cards([n for n in nodes if n not in found], found, before)
            nodes = [n for n in nodes if n not in found.impostors]  # whose places are still free
            online = [n for n in nodes if n in found.cards]
            faults = len(found.faults)
            complete = not self.identities.has_keys and len(online) + faults == len(nodes)  # a simulation never grows
            if len(online) < self.needed and (
                expected - faults < self.needed or (complete and faults and not self.common.min_silos)
            ):
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
        names = ", ".join(sorted(c["name"] for c in found.cards.values())) or "none"
        refused = "".join(f"; refused: {reason}" for reason in [*found.impostors.values(), *found.faults.values()])
        waited = f"waited {self.common.round_timeout:g} s for {expected} silos"
        return f"{waited}; here are {len(found.cards)}: {names}{refused}"

    def ask_cards(self, nodes: Sequence[int], found: Candidates, before: Mapping[str, Any] | None = None) -> None:
        """Add these nodes' data summaries to ``found``, or the reason why a node has none.

        A node that is not reachable, or whose process died (out of memory, killed), is asked again later. ``before``:
        the silos of the resumed run, if there is one; other silos take part in new runs only.
        """
        asked = [card_message(node) for node in nodes]
        policy = TimeoutPolicy(CARD_SECONDS)
        exchange = Exchange(self.grid, policy, most=lambda _: CARD_BYTES, receipts=self.receipts)
        for reply in sorted(exchange.run(asked) if asked else [], key=lambda reply: reply.metadata.src_node_id):
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
            check_reply(content, ("card",), CARD_BYTES)
            card = read_card(content.get("card"))
            self.identities.check(node, name := card["name"])
            if before and name not in (*before, *self.common.held_out):
                self.strangers[name] = found.impostors[node] = f"{name} is here, and is none of this run's silos"
                self.reporter.note(found.impostors[node])
                return
            for other in (n for n, c in found.cards.items() if c["name"] == name and n in self.identities.nodes):
                raise UserError(f"it is called {name}, as node {other} is: give each its own `name`")
        except ImpostorError as error:
            found.impostors[node] = str(error)
            self.reporter.refused(str(error))
            return
        except (UserError, DataError) as error:
            found.faults[node] = cannot_take_part(node, str(error))
            return
        found.cards[node] = card
        device, versions = card["device"], card["versions"]
        log(INFO, "%s: %d training samples, shape %s, %s, %s", name, card["n_train"], card["shape"], device, versions)

    def _may_crash(self, node: int) -> bool:
        """Count a crash of a node's process, and return whether the node is asked again."""
        self.crashes[node] += 1
        return self.crashes[node] < CARD_TRIES

    def _agree(self, cards: Mapping[str, Mapping[str, Any]], faults: Mapping[int, str], saved: State | None) -> None:
        """Set what holds for all silos, and report those left out. Raises UserError where no quorum is left."""
        known, source = declared_facts(read_agreed(self.common.agreed)), "the federation file has"
        if saved is not None:  # an older checkpoint has no facts, but data summaries
            known = saved.numbers.get("facts") or facts_of(saved.numbers["cards"].values())
            source = "this run has"
        verdict = judge(list(cards.values()), read_facts(known), source, sums=self.common.normalization == "agreed")
        self.left_out = {self.identities.registered_name(node): fault for node, fault in faults.items()}
        self.left_out |= verdict.left_out
        if len(verdict.cards) < self.needed:
            raise UserError("; ".join(dict.fromkeys(self.left_out.values())))
        for reason in self.left_out.values():
            self.reporter.note(reason)
        self.left_out |= self.strangers  # already reported
        self.facts, self.cards = verdict.facts, verdict.cards

    def absent(self, saved: State | None) -> list[SiloInfo]:
        """Return the checkpoint's silos that are offline, where a quorum is online: the run goes on without them.

        Their data summaries are the checkpoint's, so that what all silos agreed on stays as it was.
        """
        if saved is None:
            return []
        cards = saved.numbers.get("cards", {})
        offline = {n: card for n, card in cards.items() if n not in self.cards and not card["simulated"]}
        faulty = len(self.left_out) - len(self.strangers)  # silos left out are not waited for
        if not self.common.min_silos and len(offline) > faulty:
            return []
        self.cards = dict(sorted({**self.cards, **offline}.items()))
        return [silo_info(card, AWAY) for card in offline.values()]

    def readmit(self, strategy: PersonalizedStrategy, server_round: int) -> None:
        """Admit silos that were offline, or had a fault, when the run was resumed; they take part from this round on.

        A node that answers with an error is asked again in the next round; a node that does not answer is not.
        """
        offline = {name for name, info in strategy.silos.items() if info.node_id == AWAY}
        if not offline:
            return
        again = {node for node, reason in self.faulty.items() if not is_refusal(reason)}
        new = [n for n in self.identities.update(self.grid.get_nodes()) if n not in self.nodes or n in again]
        found = Candidates()
        self.ask_cards(new, found)
        for node, reason in found.faults.items():
            if self.faulty.get(node) != reason:
                self.reporter.note(reason)
        self.faulty = found.faults
        self.nodes |= {node: f"node {node}" for node in (*found.faults, *found.impostors)}
        for node, card in found.cards.items():
            name = card["name"]
            self.nodes[node] = name
            if name not in offline:
                self.reporter.note(f"{name} is here, and is none of this run's silos")
            elif misfit(card, self.facts.values, "this run has"):
                self.reporter.note(f"{name} is back with other data than before, and cannot take part in this run")
            else:
                self.cards[name] = card
                self.left_out.pop(self.identities.registered_name(node), None)
                strategy.silos[name] = silo_info(card, node)
                strategy.weigh()
                if key := self.identities.key(node):
                    self.keys[name] = key
                self.reporter.note(f"{name} is back, and takes part from round {server_round} on")


def card_message(node: int) -> Message:
    """Return the message that asks a node for its data summary."""
    content = RecordDict({"config": ConfigRecord({})})
    return Message(content, dst_node_id=node, message_type=MessageType.QUERY, ttl=CARD_SECONDS)


def cannot_take_part(node: int, reason: str) -> str:
    """Return one printable line on a node that cannot take part."""
    return printable(f"a silo (node {node}) cannot take part: {reason}")


def silo_info(card: Mapping[str, Any], node: int) -> SiloInfo:
    """Return a silo's name, node and sample counts."""
    return SiloInfo(card["name"], node, card["n_train"], card["n_val"], card["n_test"])


def facts_of(cards: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the facts that these data summaries agreed on, for a checkpoint that does not hold them."""
    cards = list(cards)
    own_file, classes = any(card["own_file"] for card in cards), max(card["classes"] for card in cards)
    return Facts(own_file, read_shape(cards[0]["shape"]), classes, cards[0].get("task", "multiclass")).saved()
