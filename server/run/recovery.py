"""Go back to an earlier checkpoint, where a silo's state is damaged and can be made anew from there.

Server and silos keep the states of the last two checkpoints. From the one before the newest, all silos together repeat
what the damaged state is of; the history is then that of an undisturbed run. A silo has this once in a run (from one
start of the server to the next), so that one that always says so does not hold the others up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flwr.app import Message

from partitions.common.errors import UserError
from server.results.checkpoint import readable_checkpoints
from server.results.own_models import any_kept
from server.run.reporter import Reporter
from strategies.base.damaged import Damage, damages
from strategies.base.settings import Common
from strategies.base.state import State
from strategies.base.strategy import PersonalizedStrategy


@dataclass(frozen=True)
class Start:
    """The start of a run that goes back: after round ``done``, with a checkpoint's state (None: as before round 1)."""

    done: int
    state: State | None
    file: Path | None
    repaired: tuple[Damage, ...]  # the damaged states that are made anew from there


class Recovery:
    """What becomes of the damaged states of one run."""

    def __init__(self, common: Common, reporter: Reporter) -> None:
        self.common, self.reporter = common, reporter
        self.repaired: set[str] = set()  # silos for which the run has gone back
        self.lost_now: dict[str, int] = {}  # silos that lost their state in this round, and the round that it was of

    def start(
        self, strategy: PersonalizedStrategy, replies: Sequence[Message], folder: Path | None, *, simulated: bool
    ) -> Start | None:
        """Return the start that the run goes back to where these replies report damaged states; None where it goes on.

        Where it goes on without the damaged states, it reports them, and :attr:`lost_now` has them. ``folder``: of the
        checkpoints. Raises UserError in a simulation that cannot go back: its numbers would differ.
        """
        names = {info.node_id: name for name, info in strategy.silos.items()}
        self.lost_now = {}
        found = damages(replies, names, strategy.round)
        if not found:
            return None
        repairable = [damage for damage in found if damage.silo not in self.repaired]
        folder = None if any_kept(folder) else folder  # its silos train no more
        start = earlier_start(folder, repairable, self.common.checkpoint_every)
        repaired = start.repaired if start is not None else ()
        if len(repaired) < len(found) and simulated:
            raise UserError(refusal([damage for damage in found if damage not in repaired]))
        if start is None:
            for damage in found:
                self.reporter.note(lost(damage, strategy.round), about="state")
            self.lost_now = {damage.silo: damage.round for damage in found}
        self.repaired |= {damage.silo for damage in repaired}
        return start


def earlier_start(folder: Path | None, damaged: Sequence[Damage], every: int) -> Start | None:
    """Return the newest checkpoint from which most of the damaged states are made anew; None where no state is.

    ``every``: rounds between checkpoints. The start of the run is one too, as long as there is at most one later one.
    """
    if folder is None:
        return None
    found = [(int(state.numbers["round"]), state, file) for file, state in readable_checkpoints(folder)]
    places: list[tuple[int, State | None, Path | None]] = [*found]
    if max((done for done, *_ in found), default=0) <= every:
        places.append((0, None, None))
    starts = [Start(*place, tuple(d for d in damaged if d.is_mended_from(place[0]))) for place in places]
    best = max(starts, key=lambda start: len(start.repaired), default=None)  # the first, and newest, of equals
    return best if best is not None and best.repaired else None


def describe(damaged: Sequence[Damage]) -> str:
    """Return the damaged states in words."""
    states = [f"{d.silo}'s state of round {d.round}" for d in damaged]
    return f"{' and '.join(states)} {'is' if len(states) == 1 else 'are'} damaged"


def gone_back(start: Start) -> str:
    """Return one line on the round that the run goes back to."""
    where = f"goes back to the end of round {start.done}" if start.done else "begins again at round 1"
    return f"{describe(start.repaired)}: the run {where} and repeats the rounds after it"


def lost(damage: Damage, server_round: int) -> str:
    """Return one line on a state that is lost."""
    kept = max(damage.kept, default=0)
    then = f"goes on from its state of round {kept}" if kept else "begins anew"
    return f"{describe([damage])}, and the run cannot go back for it: it misses round {server_round} and then {then}"


def refusal(damaged: Sequence[Damage]) -> str:
    """Return one line for a simulation, which would end with other numbers without these states."""
    reasons = "; ".join(f"{d.silo}: {d.reason}" for d in damaged)
    return (
        f"{reasons}; the run cannot go back for it: restore the file from a backup, or start the run again with "
        "another --out"
    )
