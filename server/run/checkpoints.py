"""Checkpoint and resume: the server's state of a run apart from the history.

Recovery from a silo's damaged state: the run goes back to an earlier checkpoint and recomputes it.

Server and silos keep the states of the last two checkpoints. From the older one, all silos together repeat the rounds
of the damaged state; the history then equals an undisturbed run's. The run goes back once per silo, from one start of
the server to the next. So a silo that always reports damage cannot block the others.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from logging import INFO
from pathlib import Path
from typing import Any, cast

from flwr.app import Message
from flwr.common import log
from torch import Tensor

from partitions.common.errors import UserError
from server.results.history import History
from server.results.models import any_kept
from server.results.reasons import merge_reasons
from server.results.run_directory import (
    BEFORE,
    NAMES,
    REPORTED,
    go_back_to,
    load_checkpoint,
    map_reported,
    readable_checkpoints,
    save_checkpoint,
)
from server.run.newcomers import NewcomerPayloads
from server.run.registration.registration import Registration
from server.run.reporter import Reporter
from strategies.base.run_settings import RunSettings
from strategies.base.settings import Common
from strategies.base.state import State
from strategies.base.strategy import PersonalizedStrategy
from strategies.base.transport.payload import Number
from strategies.base.transport.reporting import Damage, damages

NO_SECONDS = dict.fromkeys(
    ("total", "train", "communicate", "aggregate"), 0.0
)  # of the parts of a round


@dataclass
class LoopState:
    """State of a run apart from the strategy's own."""

    run_id: str = field(default_factory=lambda: secrets.token_hex(8))
    # Standardise tables; and the silos that use their own
    statistics: dict[str, Any] = field(default_factory=dict)
    # For every silo's app (classes, task, ...)
    numbers: dict[str, Number] = field(default_factory=dict)
    weights: str = ""  # SHA-256 of the file with the network's initial weights
    seconds: dict[str, float] = field(default_factory=NO_SECONDS.copy)
    total_bytes: dict[str, int] = field(default_factory=lambda: {"down": 0, "up": 0})
    # Silo whose state is lost -> last round that it may be from
    lost: dict[str, int] = field(default_factory=dict)
    # The shared model of the reported round, if any
    shared: dict[str, Tensor] = field(default_factory=dict)
    # What held-out hospitals would have received in that round
    newcomers: NewcomerPayloads = field(default_factory=NewcomerPayloads)

    @classmethod
    def begin(cls, saved: State | None) -> LoopState:
        """Return the initial state, with the values that a checkpoint fixes for the whole run."""
        numbers = saved.numbers if saved else {}
        return cls(
            statistics=dict(numbers.get("statistics", {})),
            weights=str(numbers.get("weights", "")),
        )

    def add(self, down: int, up: int, **seconds: float) -> None:
        """Add the bytes of a round, and the seconds of its parts."""
        self.total_bytes["down"] += down
        self.total_bytes["up"] += up
        for part, took in seconds.items():
            self.seconds[part] += took

    def apply(self, strategy: PersonalizedStrategy, saved: State | None) -> int:
        """Restore this state and the strategy's from a checkpoint, or to before round 1; return the last round."""
        if saved is None:
            if strategy.round:
                strategy.initialise(strategy.plan, strategy.initial)
            self.seconds, self.total_bytes, self.lost = {**NO_SECONDS}, {"down": 0, "up": 0}, {}
            self.shared, self.newcomers = {}, NewcomerPayloads()
            return 0
        arrays = dict(saved.arrays)
        self.shared = {
            name: arrays.pop(REPORTED + name) for name in NAMES if REPORTED + name in arrays
        }
        self.newcomers = NewcomerPayloads.unpack(arrays, saved.numbers.get("newcomers", {}))
        strategy.state = strategy.state_type(arrays, saved.numbers["strategy"])
        self.seconds, self.total_bytes = saved.numbers["seconds"], saved.numbers["bytes"]
        self.lost = dict(saved.numbers.get("lost", {}))
        return cast(int, saved.numbers["round"])


@dataclass
class Checkpoints:
    """The checkpoints of one run: load, restore, check and save."""

    settings: RunSettings
    folder: Path | None
    history: History
    reporter: Reporter
    # Whether the newest checkpoint is damaged, so that the previous one is resumed
    fallen_back: bool = False

    def load(self) -> State | None:
        """Return the checkpoint to resume, if there is one."""
        if self.folder is None or not self.settings.common.resume:
            return None
        note, state, fault = self.reporter.note, *load_checkpoint(self.folder)
        if state is None:
            if self.history.of(*self.settings.common.which):
                key = self.settings.run_key
                note(
                    f"{key} has no checkpoint, though history.csv has rounds of it: it begins again at round 1"
                )
            return None
        if withdrawn := state.numbers.get("withdrawn"):
            names = ", ".join(withdrawn)
            raise UserError(
                f"{self.folder}: {names} withdrew from this run, which cannot go on: start a new one"
            )
        if fault:
            self.fallen_back = True
            note(
                f"{self.settings.run_key} goes on after round {state.numbers['round']}, from the checkpoint before the "
                f"newest: {fault}",
                about="state",
            )
        return state

    def restore(
        self,
        run_state: LoopState,
        strategy: PersonalizedStrategy,
        saved: State | None,
        registration: Registration,
    ) -> int:
        """Restore the checkpoint's state into run and strategy; return its round, or 0 without a checkpoint."""
        if saved is not None:
            if sorted(strategy.silos) != saved.numbers["silos"]:
                raise UserError(
                    f"{self.folder} is of the silos {', '.join(saved.numbers['silos'])}; here are "
                    f"{', '.join(sorted({*strategy.silos, *registration.requests.strangers}))} "
                    "(min-silos lets a run go on without some)"
                )
            # Otherwise the next save would keep the damaged one as `BEFORE`
            if self.fallen_back and self.folder:
                go_back_to(self.folder, self.folder / BEFORE)
            run_state.run_id = saved.numbers["run_id"]
            log(INFO, "resumes after round %d", saved.numbers["round"])
        run_state.numbers |= {"run_id": run_state.run_id, "state_lost": 0}
        return run_state.apply(strategy, saved)

    def go_back(self, start: Start) -> None:
        """Remove the checkpoints that are newer than the one from which the run starts again."""
        if self.folder is not None:
            go_back_to(self.folder, start.file)

    def check_own_models(self) -> None:
        """Raise UserError if silos' own models were collected at the end of this run: it cannot train further."""
        if any_kept(self.folder):
            raise UserError(
                f"{self.folder}: silos' own models have left at the end of this run (keep-models), which trains no "
                "further: start a new one"
            )

    def check_history(self, saved: State, done: int) -> None:
        """Report rows of the history, up to the checkpoint's round, that are missing or changed."""
        key = self.settings.run_key
        which = self.settings.common.which
        note, digest = self.reporter.note, self.history.digest(*which)
        if missing := self.history.missing_rounds(*which, done):
            numbers = ", ".join(map(str, missing))
            note(
                f"history.csv has nothing of {key} in rounds {numbers}, of {done} that are done: it was damaged"
            )
        elif saved.numbers.get("history", digest) != digest:
            note(
                f"history.csv has other rows of {key} than when round {done} was saved: it was damaged or edited"
            )

    def save(
        self,
        run_state: LoopState,
        strategy: PersonalizedStrategy,
        registration: Registration,
        reported: int,
    ) -> None:
        """Save the checkpoint of the strategy's round. ``reported``: the round that the report would show now."""
        if self.folder is None:
            return
        numbers = {
            "round": strategy.round,
            "run_id": run_state.run_id,
            "silos": sorted(strategy.silos),
            "cards": registration.summaries,
            "facts": registration.data_spec.to_json(),
            "statistics": run_state.statistics,
            "keys": registration.keys,
            "lost": run_state.lost,
            "weights": run_state.weights,
            "strategy": strategy.state.numbers,
            "seconds": run_state.seconds,
            "bytes": run_state.total_bytes,
            "history": self.history.digest(*self.settings.common.which),
            "reported": reported,
        }
        kept = {REPORTED + name: array for name, array in run_state.shared.items()}
        newcomers, numbers["newcomers"] = run_state.newcomers.pack()
        save_checkpoint(
            self.folder, State({**strategy.state.arrays, **kept, **newcomers}, numbers)
        )
        # Only written from now on: mapped from the file, it takes no memory
        run_state.shared = map_reported(self.folder, run_state.shared)


@dataclass(frozen=True)
class Start:
    """Restart point: after round ``done``, with a checkpoint's state (None: the state before round 1)."""

    done: int
    state: State | None
    file: Path | None
    repaired: tuple[Damage, ...]  # the damaged states that are recomputed from there


@dataclass
class Recovery:
    """Handling of the damaged states of one run."""

    common: Common
    reporter: Reporter

    def __post_init__(self) -> None:
        self.repaired: set[str] = set()  # silos for which the run has gone back
        # Silos that lost their state in this round, and the round that it was of
        self.lost_now: dict[str, int] = {}

    def start(
        self,
        strategy: PersonalizedStrategy,
        replies: Sequence[Message],
        folder: Path | None,
        *,
        simulated: bool,
    ) -> Start | None:
        """Return the restart point if these replies report damaged states; None if the run goes on.

        If it goes on without the damaged states, they are reported, and :attr:`lost_now` holds them. ``folder``: of the
        checkpoints. Raises UserError in a simulation that cannot go back: its numbers would differ.
        """
        self.lost_now = {}
        damaged = damages(replies, strategy.plan.nodes, strategy.round)
        if not damaged:
            return None
        repairable = [damage for damage in damaged if damage.silo not in self.repaired]
        # After silos' own models were sent, the run trains no further
        folder = None if any_kept(folder) else folder
        start = earlier_start(folder, repairable, self.common.checkpoint_every)
        repaired = start.repaired if start is not None else ()
        if len(repaired) < len(damaged) and simulated:
            raise UserError(refusal([damage for damage in damaged if damage not in repaired]))
        if start is None:
            for damage in damaged:
                self.reporter.note(describe_lost(damage, strategy.round), about="state")
            self.lost_now = {damage.silo: damage.round for damage in damaged}
        self.repaired |= {damage.silo for damage in repaired}
        return start


def earlier_start(folder: Path | None, damaged: Sequence[Damage], every: int) -> Start | None:
    """Return the checkpoint that recomputes the most damaged states, the newest of equals; None if none does.

    ``every``: rounds between checkpoints. The start of the run is a candidate while at most one checkpoint exists.
    """
    if folder is None:
        return None
    checkpoints = [
        (int(state.numbers["round"]), state, file)
        for file, state in readable_checkpoints(folder)
    ]
    places: list[tuple[int, State | None, Path | None]] = [*checkpoints]
    if max((done for done, *_ in checkpoints), default=0) <= every:
        places.append((0, None, None))
    starts = [
        Start(*place, tuple(d for d in damaged if d.is_mended_from(place[0])))
        for place in places
    ]
    # The first, and newest, of equals
    best = max(starts, key=lambda start: len(start.repaired), default=None)
    return best if best is not None and best.repaired else None


def name_states(damaged: Sequence[Damage]) -> str:
    """Return a phrase that names the damaged states."""
    states = [f"{d.silo}'s state of round {d.round}" for d in damaged]
    return f"{' and '.join(states)} {'is' if len(states) == 1 else 'are'} damaged"


def gone_back(start: Start) -> str:
    """Return a one-line message on the round that the run goes back to."""
    where = (
        f"goes back to the end of round {start.done}"
        if start.done
        else "begins again at round 1"
    )
    return f"{name_states(start.repaired)}: the run {where} and repeats the rounds after it"


def describe_lost(damage: Damage, server_round: int) -> str:
    """Return a one-line message on a lost state."""
    kept = max(damage.kept, default=0)
    then = f"goes on from its state of round {kept}" if kept else "begins anew"
    return f"{name_states([damage])}, and the run cannot go back for it: it misses round {server_round} and then {then}"


def refusal(damaged: Sequence[Damage]) -> str:
    """Return the error message of a simulation whose results would differ without these states."""
    reasons = "; ".join(merge_reasons((d.silo, d.reason) for d in damaged))
    return (
        f"{reasons}; the run cannot go back for it: restore the file from a backup, or start the run again with "
        "another --out"
    )
