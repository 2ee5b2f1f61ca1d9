"""Recovery from a silo's damaged state: the run goes back to an earlier checkpoint and recomputes it.

Server and silos keep the states of the last two checkpoints. From the older one, all silos together repeat the rounds
of the damaged state; the history then equals an undisturbed run's. The run goes back once per silo, from one start of
the server to the next. So a silo that always reports damage cannot block the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flwr.app import Message

from partitions.common.errors import UserError
from server.results.checkpoint import readable_checkpoints
from server.results.models import any_kept
from server.run.reporter import Reporter
from strategies.base.settings import Common
from strategies.base.state import State
from strategies.base.strategy import PersonalizedStrategy
from strategies.base.transport.damaged import Damage, damages


@dataclass(frozen=True)
class Start:
    """Restart point: after round ``done``, with a checkpoint's state (None: the state before round 1)."""

    done: int
    state: State | None
    file: Path | None
    repaired: tuple[Damage, ...]  # the damaged states that are recomputed from there


class Recovery:
    """Handling of the damaged states of one run."""

    def __init__(self, common: Common, reporter: Reporter) -> None:
        self.common = common
        self.reporter = reporter
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
        found = damages(replies, strategy.plan.nodes, strategy.round)
        if not found:
            return None
        repairable = [damage for damage in found if damage.silo not in self.repaired]
        # After silos' own models were sent, the run trains no further
        folder = None if any_kept(folder) else folder
        start = earlier_start(folder, repairable, self.common.checkpoint_every)
        repaired = start.repaired if start is not None else ()
        if len(repaired) < len(found) and simulated:
            raise UserError(refusal([damage for damage in found if damage not in repaired]))
        if start is None:
            for damage in found:
                self.reporter.note(describe_lost(damage, strategy.round), about="state")
            self.lost_now = {damage.silo: damage.round for damage in found}
        self.repaired |= {damage.silo for damage in repaired}
        return start


def earlier_start(folder: Path | None, damaged: Sequence[Damage], every: int) -> Start | None:
    """Return the checkpoint that recomputes the most damaged states, the newest of equals; None if none does.

    ``every``: rounds between checkpoints. The start of the run is a candidate while at most one checkpoint exists.
    """
    if folder is None:
        return None
    found = [
        (int(state.numbers["round"]), state, file)
        for file, state in readable_checkpoints(folder)
    ]
    places: list[tuple[int, State | None, Path | None]] = [*found]
    if max((done for done, *_ in found), default=0) <= every:
        places.append((0, None, None))
    starts = [
        Start(*place, tuple(d for d in damaged if d.is_mended_from(place[0])))
        for place in places
    ]
    # The first, and newest, of equals
    best = max(starts, key=lambda start: len(start.repaired), default=None)
    return best if best is not None and best.repaired else None


def describe(damaged: Sequence[Damage]) -> str:
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
    return f"{describe(start.repaired)}: the run {where} and repeats the rounds after it"


def describe_lost(damage: Damage, server_round: int) -> str:
    """Return a one-line message on a lost state."""
    kept = max(damage.kept, default=0)
    then = f"goes on from its state of round {kept}" if kept else "begins anew"
    return f"{describe([damage])}, and the run cannot go back for it: it misses round {server_round} and then {then}"


def refusal(damaged: Sequence[Damage]) -> str:
    """Return the error message of a simulation whose results would differ without these states."""
    reasons = "; ".join(f"{d.silo}: {d.reason}" for d in damaged)
    return (
        f"{reasons}; the run cannot go back for it: restore the file from a backup, or start the run again with "
        "another --out"
    )
