"""The round loop, once for all methods and for all three ways to run.

Gather data cards; per round: payloads out, replies in, checks, aggregation,
history, checkpoint; closing evaluation.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from logging import INFO
from pathlib import Path
from typing import Any, cast

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType
from flwr.common import log
from flwr.serverapp import Grid
from torch import Tensor

from models.initial import flat_model, initial_model
from models.standardisation import agreed_statistics
from models.threads import use_threads
from server.run.checkpoint import load_checkpoint, save_checkpoint
from server.run.exchange import UNREACHABLE, Exchange, Patience
from server.run.gathering import Gathering
from server.run.history import History, Row, metric_rows
from server.run.names import Names
from server.run.rundir import RunDirectory
from strategies.base.metrics_and_cards import SECONDS, read_metrics
from strategies.base.run_settings import RunSettings
from strategies.base.server import PersonalizedStrategy, SiloInfo, check_task
from strategies.base.settings import UserError
from strategies.base.silo import model_of
from strategies.base.state import State

FORMAT = 2  # of the server's checkpoint
JUMP_SECONDS = 60.0  # by which the server's clock may be set without a word


@dataclass
class Progress:
    """What a round came to, for whoever watches."""

    round: int
    rounds: int
    silos: int
    score: float  # unweighted mean over silos of the task's score on test data, of the snapshot that the method reports
    seconds: float
    bytes: int
    rejected: dict[str, str] = field(default_factory=dict)
    bounded: dict[str, str] = field(default_factory=dict)  # silos whose step counted in part only, and why


class RoundLoop(Gathering):
    """One run of one method."""

    def __init__(
        self,
        grid: Grid,
        settings: RunSettings,
        directory: RunDirectory | None = None,
        watch: Callable[[Progress], object] | None = None,
    ) -> None:
        super().__init__(grid, settings, directory)
        self.watch = watch
        self.history = History(directory.history if directory else None)
        self.run_id = secrets.token_hex(8)
        self.statistics: dict[str, Any] = {}  # by which tables are standardised, and whose own hold instead
        self.weights = ""  # SHA-256 of the file that the network starts from
        self.seconds = {"total": 0.0, "train": 0.0, "communicate": 0.0, "aggregate": 0.0}
        self.total_bytes = {"down": 0, "up": 0}
        self.said: dict[str, Any] = {}  # what silos said last of their number of samples, where that has changed
        self.gone: set[int] = set()  # nodes that went away in a round and have not answered since
        self.answered: set[int] = set()  # nodes of which the last exchange has a reply
        self.clock = time.time() - time.monotonic()  # what this machine's clock showed when it was started
        self.waited = settings.common.round_timeout  # seconds that the silos of the last exchange had

    def run(self) -> PersonalizedStrategy:
        """All rounds and the closing evaluation. Raises UserError, or RuntimeError with the reason of a failure."""
        use_threads(self.common.threads)
        saved = self.saved()
        self.keys = dict(saved.numbers.get("keys", {})) if saved else {}
        self.names = Names(self.keys)
        self.statistics = dict(saved.numbers.get("statistics", {})) if saved else {}
        self.weights = str(saved.numbers.get("weights", "")) if saved else ""
        silos = self.gather(saved)
        strategy = self.prepare(silos + self.absent(saved))
        strategy.summary()
        done = self.restore(strategy, saved)
        self.history.forget(self.common.strategy, self.common.seed, after=done)
        if saved is not None:
            self._check_history(saved, done)
        for server_round in range(done + 1, self.common.rounds + 1):
            self.round(strategy, server_round)
        self.close(strategy)
        return strategy

    # -- before the first round ---------------------------------------------------------------------------------------

    def prepare(self, silos: list[SiloInfo]) -> PersonalizedStrategy:
        """The strategy in its state of before round 1, and what all silos are told: classes, statistics, the run."""
        c, shape, classes = self.common, self.facts.shape, self.facts.classes
        check_task(self.settings.strategy, self.task, classes, c)
        self.settings.augmentation_for(shape)
        name, options = self.settings.model_for(shape, self.task.name)
        head, part = self.settings.strategy.head, self.settings.part()
        sha256 = part.weights.sha256 if part.weights else ""
        if self.weights not in ("", sha256):
            raise UserError(f"init-weights = {c.init_weights} is another file than the run began with: restore it")
        self.weights = sha256
        layout = flat_model(name, shape, classes, options, "cpu", head, part).layout
        strategy = self.settings.strategy(c, self.settings.method, layout)
        strategy.initialise(silos, initial_model(name, shape, classes, options, c.seed, head, part))
        self._name_the_weighed(strategy)
        self.min_metric_samples = c.min_metric_samples or (10 if self.facts.own_file else 1)
        if not self.statistics:
            self.statistics = {**agreed_statistics(list(self.cards.values()), strategy.samples)}
            if alone := self.without_sums():
                self.statistics["own_statistics"] = alone
        strategy.extra = {
            "classes": classes,
            "task": self.task.name,
            "run": self.directory.name if self.directory else "",
            "min_metric_samples": self.min_metric_samples,
            **self.statistics,
        }
        strategy.extra |= {"weights": sha256} if sha256 else {}
        return strategy

    def saved(self) -> State | None:
        """The checkpoint that is to be resumed, if there is one."""
        folder = self._checkpoint()
        if folder is None or not self.common.resume:
            return None
        state, fault = load_checkpoint(folder)
        if state is None:
            if self.history.of(self.common.strategy, self.common.seed):
                key = self.settings.run_key
                self.note(f"{key} has no checkpoint, though history.csv has rounds of it: it begins again at round 1")
            return None
        if gone := state.numbers.get("withdrawn"):
            raise UserError(f"{folder}: {', '.join(gone)} withdrew from this run, which cannot go on: start a new one")
        if fault:
            self.note(
                f"the run goes on from the checkpoint before the newest, of round {state.numbers['round']}: {fault}"
            )
        return state

    def restore(self, strategy: PersonalizedStrategy, state: State | None) -> int:
        """The last round that is done: 0, or that of the checkpoint, whose state the strategy then has."""
        if state is not None:
            numbers = state.numbers["strategy"]
            if sorted(strategy.silos) != state.numbers["silos"]:
                raise UserError(
                    f"{self._checkpoint()} is of the silos {', '.join(state.numbers['silos'])}; here are "
                    f"{', '.join(sorted({*strategy.silos, *self.strangers}))} (min-silos lets a run go on without some)"
                )
            strategy.state = State(by_key(state), numbers)
            self.run_id = state.numbers["run_id"]
            self.seconds, self.total_bytes = state.numbers["seconds"], state.numbers["bytes"]
            log(INFO, "resumes after round %d", state.numbers["round"])
            done = cast(int, state.numbers["round"])
        else:
            done = 0
        strategy.extra["run_id"] = self.run_id
        return done

    def _checkpoint(self) -> Path | None:
        return self.directory.checkpoint(self.settings.run_key) if self.directory else None

    def _check_history(self, saved: State, done: int) -> None:
        """Name what the history has lost of the rounds that the checkpoint counts on."""
        key, which = self.settings.run_key, (self.common.strategy, self.common.seed)
        if missing := self.history.missing(*which, done):
            numbers = ", ".join(map(str, missing))
            self.note(f"history.csv has nothing of {key} in rounds {numbers}, of {done} that are done: it was damaged")
        elif saved.numbers.get("history", self.history.digest(*which)) != self.history.digest(*which):
            self.note(f"history.csv has other rows of {key} than when round {done} was saved: it was damaged or edited")

    # -- a round ------------------------------------------------------------------------------------------------------

    def round(self, strategy: PersonalizedStrategy, server_round: int) -> None:
        self.take_back(strategy, server_round)
        started = time.perf_counter()
        c = self.common
        save = server_round % c.checkpoint_every == 0 or server_round == c.rounds
        messages = strategy.configure_train(server_round, ArrayRecord(), ConfigRecord({"save": save}), self.grid)
        sent = time.perf_counter()
        replies = self.exchange(messages)
        received = time.perf_counter()
        strategy.aggregate_train(server_round, replies)
        strategy.aggregate_evaluate(server_round, replies)
        self._name_the_silent(strategy, messages, replies)
        self._name_the_changed(strategy, replies)
        self._check_quorum(strategy, messages)
        aggregated = time.perf_counter()
        metrics = self.metrics(strategy, replies)
        rows = self.rows(strategy, server_round, metrics)
        seconds = aggregated - started
        rows += self._round_rows(server_round, seconds, strategy.bytes_down, strategy.bytes_up)
        self.history.add(rows)
        compute = self._compute_seconds(metrics.values())
        for key, value in (
            ("total", seconds),
            ("train", compute),
            ("communicate", max(received - sent - compute, 0.0)),
            ("aggregate", aggregated - received),
        ):
            self.seconds[key] += value
        self.total_bytes["down"] += strategy.bytes_down
        self.total_bytes["up"] += strategy.bytes_up
        if save:
            self.save(strategy, server_round)
        self._tell(strategy, rows, server_round, seconds)

    def close(self, strategy: PersonalizedStrategy) -> None:
        """The closing exchange: every silo evaluates what it would start the next round from."""
        started = time.perf_counter()
        messages = strategy.configure_evaluate(
            self.common.rounds, ArrayRecord(), ConfigRecord({"save": False}), self.grid
        )
        if messages:
            replies = self.exchange(messages)
            strategy.aggregate_evaluate(self.common.rounds, replies)
            self._name_the_silent(strategy, messages, replies)
            self.history.add(self.rows(strategy, self.common.rounds + 1, self.metrics(strategy, replies)))
            seconds = time.perf_counter() - started
            self.history.add(self._round_rows(self.common.rounds + 1, seconds, strategy.bytes_down, 0))
            self.seconds["total"] += seconds

    @property
    def in_one_process(self) -> bool:
        """Whether all silos compute in this process, while their replies are pulled."""
        return hasattr(self.grid, "seconds")

    def exchange(self, messages: Sequence[Message]) -> list[Message]:
        """Send a round's messages and collect the replies; who is silent is named later."""
        c = self.common
        hurried = not any(card["simulated"] for card in self.cards.values())  # no number depends on a simulation's time
        patience = Patience(
            c.round_timeout,
            c.straggler_factor if hurried else 0.0,
            c.straggler_floor,
            c.min_silos,
            c.lost_silo == "resend",
            looks=hurried and not self.in_one_process,
        )
        exchange = Exchange(
            self.grid, patience, self._tell_gone, self._look_at_the_clock, self.answered, self._tell_moves
        )
        replies = exchange.run(messages)
        self.waited = exchange.limit
        back = {r.metadata.src_node_id for r in replies if not (r.has_error() and r.error.code in UNREACHABLE)}
        for node in sorted(self.gone & back):
            self.note(f"{self._named(node)} is back")
        self.gone -= back
        self.answered = back
        return replies

    def _named(self, node: int) -> str:
        return self.nodes.get(node, f"node {node}")

    def _tell_moves(self, line: str, nodes: Collection[int]) -> None:
        """How far a reply is that takes long: to the log, and to who follows the run."""
        line += f"; waits for {', '.join(sorted(map(self._named, nodes)))}" if nodes else ""
        log(INFO, "%s", line)
        if self.directory is not None:
            self.directory.progress("transfer", strategy=self.common.strategy, seed=self.common.seed, message=line)

    def _tell_gone(self, node: int) -> None:
        """In the middle of a round: whoever looks sees at once whom it waits for, or goes on without."""
        if node in self.gone:
            return
        self.gone.add(node)
        then = "waits for it" if self.common.lost_silo == "resend" else "the round goes on without it"
        self.note(f"{self._named(node)} is gone; {then}")

    def _look_at_the_clock(self) -> None:
        """Flower takes who is here by this machine's clock, and refuses silos that have another time."""
        if abs(jump := time.time() - time.monotonic() - self.clock) > JUMP_SECONDS:
            self.clock += jump
            way = "forward" if jump > 0 else "back"
            self.note(
                f"this server's clock went {way} by {abs(jump) / 3600:.1f} h (it was set, or the machine slept): silos "
                "that have another time are refused until it agrees with theirs"
            )

    def _name_the_silent(
        self, strategy: PersonalizedStrategy, messages: Sequence[Message], replies: Iterable[Message]
    ) -> None:
        """Silos whose reply did not come in time."""
        answered = {r.metadata.src_node_id for r in replies}
        asked = {m.metadata.dst_node_id for m in messages}
        for name, info in strategy.silos.items():
            if info.node_id in asked - answered:
                hurried = " (straggler-factor, straggler-floor)" if self.waited < self.common.round_timeout else ""
                strategy.reject(name, f"no reply within {self.waited:g} s{hurried}")

    def _name_the_changed(self, strategy: PersonalizedStrategy, replies: Iterable[Message]) -> None:
        """Silos that trained on another number of samples than their card says, once for each number."""
        infos = {info.node_id: info for info in strategy.silos.values()}
        for reply in replies:
            info = infos.get(reply.metadata.src_node_id)
            if info is None or strategy.pooled or reply.metadata.message_type != MessageType.TRAIN:
                continue
            config = None if reply.has_error() else reply.content.get("config")
            said = config.get("samples") if isinstance(config, ConfigRecord) else None
            if said is not None and self.said.get(info.name, info.n_train) != said:
                self.said[info.name] = said
                self.note(
                    f"{info.name} says in round {strategy.round} that it has {said!r} training samples; it said "
                    f"{info.n_train}, and counts as {strategy.samples[info.name]}"
                )

    def _check_quorum(self, strategy: PersonalizedStrategy, messages: Sequence[Message]) -> None:
        """Below the quorum the run stops, for its result would be another's."""
        trained = {m.metadata.dst_node_id for m in messages if m.metadata.message_type == MessageType.TRAIN}
        names = [name for name, info in strategy.silos.items() if info.node_id in trained]
        usable = len([name for name in names if name not in strategy.rejected])
        if usable < self.common.min_silos:
            reasons = "; ".join(f"{silo}: {reason}" for silo, reason in strategy.rejected.items())
            raise RuntimeError(
                f"round {strategy.round}: {usable} usable updates, min-silos = {self.common.min_silos} ({reasons})"
            )

    # -- what is written down -----------------------------------------------------------------------------------------

    def metrics(self, strategy: PersonalizedStrategy, replies: Iterable[Message]) -> dict[str, dict[str, float]]:
        """What the silos that are not left out have measured, by name."""
        names = {i.node_id: i.name for i in strategy.silos.values() if i.name not in strategy.rejected}
        return {
            names[r.metadata.src_node_id]: read_metrics(r.content.get("metrics"))
            for r in replies
            if r.metadata.src_node_id in names
        }

    def rows(
        self, strategy: PersonalizedStrategy, server_round: int, metrics: Mapping[str, Mapping[str, float]]
    ) -> list[Row]:
        rows: list[Row] = []
        for name, measured in metrics.items():
            info = strategy.silos[name]
            counts = {"train": info.n_train, "val": info.n_val, "test": info.n_test}
            rows += metric_rows(
                self.common.strategy,
                self.common.seed,
                server_round,
                name,
                measured,
                counts,
                self.min_metric_samples,
                self.task.score,
            )
        rows.sort(key=lambda r: (r.silo, r.split, r.snapshot, r.metric))
        rows += [self._row(server_round, "rejected", 1.0, silo) for silo in sorted(strategy.rejected)]
        bounded = sorted(strategy.bounded.items())
        rows += [self._row(server_round, "bounded", share, silo) for silo, (share, _) in bounded]
        return rows

    def _row(self, server_round: int, metric: str, value: float, silo: str = "") -> Row:
        return Row(self.common.strategy, self.common.seed, server_round, silo, "", "", metric, value, None)

    def _round_rows(self, server_round: int, seconds: float, down: int, up: int) -> list[Row]:
        values = {"round_seconds": seconds, "bytes_down": float(down), "bytes_up": float(up)}
        return [self._row(server_round, metric, value) for metric, value in values.items()]

    def _compute_seconds(self, metrics: Iterable[Mapping[str, float]]) -> float:
        """Seconds the silos computed: of the slowest, or of all where they share one process."""
        of_all: float | None = getattr(self.grid, "seconds", None)
        if of_all is not None:
            return of_all
        return max((sum(m.get(name, 0.0) for name in SECONDS) for m in metrics), default=0.0)

    def save(self, strategy: PersonalizedStrategy, server_round: int) -> None:
        folder = self._checkpoint()
        if folder is not None:
            numbers = {
                "format": FORMAT,
                "round": server_round,
                "run_id": self.run_id,
                "silos": sorted(strategy.silos),
                "cards": self.cards,
                "facts": self.facts.saved(),
                "statistics": self.statistics,
                "keys": self.keys,
                "weights": self.weights,
                "strategy": strategy.state.numbers,
                "seconds": self.seconds,
                "bytes": self.total_bytes,
                "history": self.history.digest(self.common.strategy, self.common.seed),
            }
            save_checkpoint(folder, State(strategy.state.arrays, numbers))

    def _tell(self, strategy: PersonalizedStrategy, rows: Sequence[Row], server_round: int, seconds: float) -> None:
        values = [
            r.value
            for r in rows
            if (r.split, r.snapshot, r.metric) == ("test", strategy.reports, self.task.score)
            and not math.isnan(r.value)
        ]
        score = sum(values) / len(values) if values else float("nan")
        silos = len({r.silo for r in rows if r.silo and r.split}) or len(strategy.silos) - len(strategy.rejected)
        total = strategy.bytes_down + strategy.bytes_up
        rejected, bounded = dict(strategy.rejected), {silo: why for silo, (_, why) in strategy.bounded.items()}
        progress = Progress(server_round, self.common.rounds, silos, score, seconds, total, rejected, bounded)
        result = f"{self.task.word} {score:.4f}" if values else "not evaluated"
        log(
            INFO,
            "round %d/%d: %d silos, %s, %.1f s, %d bytes",
            server_round,
            self.common.rounds,
            silos,
            result,
            seconds,
            total,
        )
        if self.directory is not None:
            self.directory.progress(
                "round",
                strategy=self.common.strategy,
                seed=self.common.seed,
                round=server_round,
                rounds=self.common.rounds,
                silos=silos,
                task=self.task.name,
                score=self.task.score,
                seconds=seconds,
                bytes=total,
                rejected=rejected,
                bounded=bounded,
                **{self.task.score: None if score != score else score},
            )
        if self.watch is not None:
            self.watch(progress)


def by_key(state: State) -> dict[str, Tensor]:
    """The server's arrays of a checkpoint; one of before format 2 has silos' models under their bare names."""
    silos = () if state.numbers.get("format", 1) >= FORMAT else state.numbers["silos"]
    return {model_of(name) if name in silos else name: array for name, array in state.arrays.items()}
