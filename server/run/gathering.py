"""Who takes part in a run: asks each silo for its data card, leaves out who does not fit the others, and says so.

Before the first round all silos are gathered; later, those that were away when the run was resumed may come back.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from logging import INFO, WARNING
from typing import Any

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.common import log
from flwr.serverapp import Grid

from models.shapes import read_shape
from models.tasks import Task, task_of
from server.run.exchange import CRASHED, UNREACHABLE, Exchange, Patience
from server.run.names import ImpostorError, Names
from server.run.rundir import RunDirectory
from strategies.base.cards import Facts, judge, misfit, read_agreed
from strategies.base.metrics_and_cards import WITHHELD, columns_of, printable, read_card, reason_of
from strategies.base.run_settings import RunSettings
from strategies.base.server import AWAY, PersonalizedStrategy, SiloInfo
from strategies.base.settings import UserError
from strategies.base.state import State

CARD_SECONDS = 300.0  # how long a silo may take over its data card
CARD_TRIES = 3  # times that a silo is asked for it whose process dies over it


class Gathering:
    """The silos of one run: their cards, names and keys, and who is left out."""

    def __init__(self, grid: Grid, settings: RunSettings, directory: RunDirectory | None) -> None:
        self.grid, self.settings, self.common, self.directory = grid, settings, settings.common, directory
        self.cards: dict[str, dict[str, Any]] = {}
        self.facts = Facts(True, (), 1)
        self.left_out: dict[str, str] = {}  # silos, or nodes, that do not take part, and why
        self.strangers: dict[str, str] = {}  # silos that the run that is resumed does not have
        self.crashes: Counter[int] = Counter()  # how often a node's process has died over its card
        self.names = Names()
        self.keys: dict[str, str] = {}  # the fingerprint of each silo's key, where it is registered under its name
        self.nodes: dict[int, str] = {}  # the names of the nodes that take part, or may not

    def gather(self, saved: State | None = None) -> list[SiloInfo]:
        """Wait for the silos and ask each for its data card; who does not fit the others is left out and named.

        ``saved``: the checkpoint of the run that is resumed, of whose silos the facts hold.
        """
        cards: dict[int, dict[str, Any]] = {}
        faults: dict[int, str] = {}
        impostors: dict[int, str] = {}
        before: dict[str, dict[str, Any]] = saved.numbers.get("cards", {}) if saved else {}
        expected = len(before) or self.common.silos
        deadline = time.monotonic() + self.common.round_timeout
        announced = -1
        while True:
            nodes = self.names.update(self.grid.get_nodes())
            asked = [n for n in nodes if n not in {**cards, **faults, **impostors}]
            self.ask_cards(asked, cards, faults, impostors, before)
            nodes = [n for n in nodes if n not in impostors]  # whose places are still free
            here = [n for n in nodes if n in cards]
            all_here = not self.names.registered and len(here) + len(faults) == len(nodes)  # a simulation's never grow
            if len(here) < self.needed and (
                expected - len(faults) < self.needed or (all_here and faults and not self.common.min_silos)
            ):
                raise UserError("; ".join(dict.fromkeys(faults.values())))
            strangers = 0 if self.names.registered else len(self.strangers)
            if len(here) + len(faults) + strangers >= expected:
                break
            if time.monotonic() > deadline:
                if 0 < self.common.min_silos <= len(here):
                    log(WARNING, "goes on with %d of %d silos", len(here), expected)
                    break
                names = ", ".join(sorted(c["name"] for c in cards.values())) or "none"
                refused = "".join(f"; refused: {reason}" for reason in [*impostors.values(), *faults.values()])
                raise RuntimeError(
                    f"waited {self.common.round_timeout:g} s for {expected} silos; "
                    f"here are {len(cards)}: {names}{refused}"
                )
            if len(here) != announced:
                log(INFO, "%d of %d silos are here", len(here), expected)
                announced = len(here)
            time.sleep(0.5)
        self._agree({cards[n]["name"]: cards[n] for n in here}, faults, saved)
        nodes_of = {cards[n]["name"]: n for n in here}
        self.nodes = {n: self.names.called(n) for n in (*faults, *impostors)} | {n: cards[n]["name"] for n in here}
        self.keys |= {name: key for name in self.cards if (key := self.names.key(nodes_of[name]))}
        self._name_the_withheld()
        self._name_changed_counts()
        return [silo_info(card, nodes_of[name]) for name, card in self.cards.items()]

    @property
    def task(self) -> Task:
        """What all silos learn."""
        return task_of(self.facts.task)

    @property
    def needed(self) -> int:
        """How many silos it takes to begin; who cannot take part, or will not, is not waited for."""
        return self.common.min_silos or 1

    def ask_cards(
        self,
        nodes: Sequence[int],
        cards: dict[int, dict[str, Any]],
        faults: dict[int, str],
        impostors: dict[int, str],
        before: Mapping[str, Any] | None = None,
    ) -> None:
        """Add these nodes' data cards, or why they have none. One that is just not reachable, or whose process died
        (out of memory, killed), is asked again later.

        ``before``: the silos of the run that is resumed, if one is; others take part in new runs only.
        """
        content = RecordDict({"config": ConfigRecord({})})
        asked = [Message(content, dst_node_id=n, message_type=MessageType.QUERY, ttl=CARD_SECONDS) for n in nodes]
        replies = Exchange(self.grid, Patience(CARD_SECONDS)).run(asked) if asked else []
        for reply in sorted(replies, key=lambda reply: reply.metadata.src_node_id):
            node = reply.metadata.src_node_id
            if not reply.has_error():
                try:
                    card = read_card(reply.content.get("card"))
                    self.names.check(node, name := card["name"])
                    if before and name not in before:
                        self.strangers[name] = impostors[node] = f"{name} is here, and is none of this run's silos"
                        self.note(impostors[node])
                        continue
                    for other in (n for n, c in cards.items() if c["name"] == name and n in self.names.nodes):
                        raise ValueError(f"it is called {name}, as node {other} is: give each its own `name`")
                    cards[node] = card
                except ImpostorError as error:
                    impostors[node] = str(error)
                    log(WARNING, "refused: %s", error)
                    if self.directory is not None:
                        self.directory.progress("refused", message=str(error))
                    continue
                except ValueError as error:
                    faults[node] = printable(f"a silo (node {node}) cannot take part: {error}")
                    continue
                log(
                    INFO,
                    "%s: %d training samples, shape %s, %s, %s",
                    card["name"],
                    card["n_train"],
                    card["shape"],
                    card["device"],
                    card["versions"],
                )
            elif reply.error.code in UNREACHABLE or (reply.error.code == CRASHED and self._may_crash(node)):
                log(WARNING, "a silo (node %d) gave no data card yet: %s", node, reason_of(reply.error.reason))
            else:
                faults[node] = printable(f"a silo (node {node}) cannot take part: {reason_of(reply.error.reason)}")

    def _may_crash(self, node: int) -> bool:
        """Whether a node whose process has died over its card once more is to be asked again."""
        self.crashes[node] += 1
        return self.crashes[node] < CARD_TRIES

    def _agree(self, cards: Mapping[str, Mapping[str, Any]], faults: Mapping[int, str], saved: State | None) -> None:
        """Take what holds for all silos, and name who is left out. Raises UserError where no quorum is left."""
        said, by = read_agreed(self.common.agreed), "the federation file has"
        if saved is not None:  # a checkpoint of before says it by its cards
            known = saved.numbers.get("facts") or facts_of(saved.numbers["cards"].values())
            said, by = known, "this run has"
        fixed = {**said, **({"shape": read_shape(said["shape"])} if "shape" in said else {})}
        verdict = judge(list(cards.values()), fixed, by, sums=self.common.normalization == "agreed")
        self.left_out = {self.names.called(node): fault for node, fault in faults.items()} | verdict.left_out
        if len(verdict.cards) < self.needed:
            raise UserError("; ".join(dict.fromkeys(self.left_out.values())))
        for reason in self.left_out.values():
            self.note(reason)
        self.left_out |= self.strangers  # who are named already
        self.facts, self.cards = verdict.facts, verdict.cards

    def absent(self, saved: State | None) -> list[SiloInfo]:
        """Silos of the checkpoint that are not here, where a quorum is: the run goes on without them.

        Their data cards are the checkpoint's, so that what all silos agreed on stays as it was.
        """
        if saved is None:
            return []
        cards = saved.numbers.get("cards", {})
        away = {n: card for n, card in cards.items() if n not in self.cards and not card["simulated"]}
        faulty = len(self.left_out) - len(self.strangers)  # who is left out is not waited for
        if not self.common.min_silos and len(away) > faulty:
            return []
        self.cards = dict(sorted({**self.cards, **away}.items()))
        return [silo_info(card, AWAY) for card in away.values()]

    def take_back(self, strategy: PersonalizedStrategy, server_round: int) -> None:
        """Silos that were away when the run was resumed, and are back, take part from this round on."""
        away = {name for name, info in strategy.silos.items() if info.node_id == AWAY}
        if not away:
            return
        new = [node for node in self.names.update(self.grid.get_nodes()) if node not in self.nodes]
        cards: dict[int, dict[str, Any]] = {}
        faults: dict[int, str] = {}
        impostors: dict[int, str] = {}
        self.ask_cards(new, cards, faults, impostors)
        for reason in faults.values():
            self.note(reason)
        self.nodes |= {node: f"node {node}" for node in (*faults, *impostors)}
        for node, card in cards.items():
            name = card["name"]
            self.nodes[node] = name
            if name not in away:
                self.note(f"{name} is here, and is none of this run's silos")
            elif misfit(card, asdict(self.facts), "this run has"):
                self.note(f"{name} is back with other data than before, and cannot take part in this run")
            else:
                self.cards[name] = card
                strategy.silos[name] = silo_info(card, node)
                strategy.weigh()
                if key := self.names.key(node):
                    self.keys[name] = key
                self.note(f"{name} is back, and takes part from round {server_round} on")

    def without_sums(self) -> list[str]:
        """The silos with columns that give no sums of them: each is standardised by its own statistics."""
        if self.common.normalization != "agreed":
            return []
        return [name for name, card in self.cards.items() if columns_of(card) and "sum" not in card]

    def _name_the_withheld(self) -> None:
        others = len(self.cards) - len(self.without_sums())
        for name in self.without_sums():
            reason = self.cards[name].get(WITHHELD) or "its card has none"
            own = f"it is standardised by its own statistics, the others by those of {others} silos"
            self.note(f"{name} gives no sums of its columns: {reason}; {own}")

    def _name_changed_counts(self) -> None:
        """Silos that have another number of training samples than in an earlier run, or part, of this directory."""
        if self.directory is None or not self.facts.own_file:  # a simulation's are drawn anew with every seed
            return
        counts = {name: card["n_train"] for name, card in self.cards.items()}
        for name, before in self.directory.sample_counts().items():
            if counts.get(name, before) != before:
                self.note(f"{name} has {counts[name]} training samples now, and said {before} before")
        self.directory.progress("silos", strategy=self.common.strategy, seed=self.common.seed, samples=counts)

    def _name_the_weighed(self, strategy: PersonalizedStrategy) -> None:
        """Silos that count as another number of samples than they say."""
        agreed = read_agreed(self.common.agreed).get("samples", {})
        for name, info in strategy.silos.items():
            if info.n_train != (weight := strategy.samples[name]):
                why = "as agreed" if name in agreed else f"{self.common.weight_cap:g} times the median (weight-cap)"
                self.note(f"{name} says that it has {info.n_train} training samples; it counts as {weight}, {why}")

    def note(self, line: str) -> None:
        """Say what whoever runs this has to know of a silo, in the log and to who follows the run."""
        line = printable(line)
        log(WARNING, "%s", line)
        if self.directory is not None:
            self.directory.progress("note", strategy=self.common.strategy, seed=self.common.seed, message=line)


def silo_info(card: Mapping[str, Any], node: int) -> SiloInfo:
    return SiloInfo(card["name"], node, card["n_train"], card["n_val"], card["n_test"])


def facts_of(cards: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The facts that these cards agreed on, in a run of before they were saved."""
    cards = list(cards)
    own_file, classes = any(card["own_file"] for card in cards), max(card["classes"] for card in cards)
    return Facts(own_file, read_shape(cards[0]["shape"]), classes, cards[0].get("task", "multiclass")).saved()
