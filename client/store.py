"""Where a silo keeps its state between rounds.

In a simulation: in Flower's ``context.state``. Where the node config names a ``state-dir``: in files, one per round;
of the rounds that the server saves (``checkpoint-every``) the last three are kept, so that a server that goes back to
its last checkpoint but one, in the middle of a round, finds the states it needs; and the last before this one, so that
a message that arrives twice finds what it found the first time. The in-process engine uses both: memory from round to
round, files for resume. Each state carries the id of the run that made it; another run's is not taken up. A damaged
state is not passed over silently: the server decides what comes of it (``server/run/recovery.py``).

    STATE_DIR/RUN/STRATEGY-SEED/SILO/run-ID/round-000007.safetensors

A process that stays for the run's next message (``client/site/runtime/prefork/persistent.py``) keeps the last state in
memory beside the file, and does not read it again as long as the file is the one it wrote.

The server chooses a run's name, and may choose one that it had before. The folder of its id keeps the runs apart, so
that no run deletes or overwrites what another one left here. (Versions before had no such folder: what lies directly in
SILO's is still read, and left alone. In the run directory of a simulation there is one run.)
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from logging import WARNING
from pathlib import Path
from typing import cast

from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.common import log

from client.local_data import silo_name
from partitions.common.errors import DataError
from strategies.base.damaged import DamagedStateError
from strategies.base.state import State
from strategies.base.transport.payload import array_record, tensor_of

KEPT_ROUNDS = 3  # the server's two checkpoints, and the round that it is at
BETWEEN = "between"  # begins the name of a state that no server checkpoint belongs to
RUN_FOLDER = re.compile(r"run-[0-9a-f]{16}")
_WRITTEN: dict[Path, tuple[tuple[int, ...], State]] = {}  # the file written last, as it then was, and what is in it


class StateStore:
    """One silo's state of one run. ``run`` names the run's directory, ``key`` is ``STRATEGY-SEED``."""

    def __init__(self, context: Context, run: str, key: str, run_id: str) -> None:
        self.context = context
        self.run_id = run_id or f"{context.run_id:016x}"  # Flower's own number, where the server's loop is not ours
        config = context.node_config
        self.folder: Path | None = None
        self.older: Path | None = None  # where versions before kept the states of all runs of this name
        if "state-path" in config:  # set by the in-process engine
            self.folder = Path(str(config["state-path"])) / silo_name(context)
        elif "state-dir" in config:
            # The server names the run; a name is all that it may be, not a way out of the directory.
            name = Path(run).name.replace("..", "_")
            self.older = Path(str(config["state-dir"])) / name / key / silo_name(context)
            self.folder = self.older / run_folder(self.run_id)
        self.in_memory = "state-dir" not in config

    def load(self, server_round: int, lost: int = 0, first: int = 1) -> State:
        """Return the newest state from before this round; an empty one where there is none of this run.

        Damaged states of rounds up to ``lost`` are passed over: the server counts them as lost. Raises
        DamagedStateError for any other damaged one, ValueError where all states are of this round or later ones:
        starting afresh would delete them. Not in the ``first`` round that the silo takes part in, which is repeated.
        """
        later = []
        for state in self._candidates(server_round, lost):
            if state.numbers.get("run_id") == self.run_id:
                if state.numbers["round"] < server_round:
                    return state
                later.append(state.numbers["round"])
        if later and server_round > first:
            raise DataError(
                f"the server resumes at round {server_round}, this silo has kept its state of round {min(later)} and "
                f"later only: it waits for round {min(later) + 1}"
            )
        return State()

    def save(self, state: State, server_round: int, *, to_disk: bool) -> None:
        """Keep ``state`` as that of this round; states of later rounds are of a past that is being repeated."""
        state.numbers |= {"run_id": self.run_id, "round": server_round}
        if self.in_memory:
            self.context.state["arrays"] = array_record(state.arrays)
            self.context.state["numbers"] = ConfigRecord({"json": json.dumps(state.numbers)})
        if self.folder is not None and (to_disk or not self.in_memory):
            kind = "round" if to_disk else BETWEEN
            file = self.folder / f"{kind}-{server_round:06d}.safetensors"
            state.save(file)
            if not self.in_memory:
                _WRITTEN.clear()
                _WRITTEN[file] = _stamp(file), _copy(state)
            _prune(self.folder, file, server_round)

    def _candidates(self, server_round: int, lost: int) -> Iterator[State]:
        if self.in_memory and "numbers" in self.context.state:
            numbers = json.loads(cast(str, cast(ConfigRecord, self.context.state["numbers"])["json"]))
            record = cast(ArrayRecord, self.context.state["arrays"])
            yield State({name: tensor_of(array) for name, array in record.items()}, numbers)
        files = [] if self.folder is None else states_in(self.folder) + (states_in(self.older) if self.older else [])
        for place, file in enumerate(files):
            try:
                state = _read(file)
            except (OSError, ValueError) as error:
                if lost < _round(file) < server_round:
                    raise self._damage(files, place, error) from error
            else:
                yield state

    def _damage(self, files: Sequence[Path], place: int, error: Exception) -> DamagedStateError:
        """Describe to the server the damaged state ``files[place]``, and those before it."""
        good = next((i for i in range(place + 1, len(files)) if self._is_readable(files[i])), place + 1)
        kept = [_round(file) for file in itertools.takewhile(self._is_readable, files[good:])]
        if len(files) == 1:  # states are only removed when there are later ones: it is the first
            kept = [0]
        reason = str(error)
        if "state-path" not in self.context.node_config:  # the path is for the hospital's own log
            log(WARNING, "%s", error)
            reason = f"{files[place].name} cannot be read"
        return DamagedStateError(_round(files[good - 1]), kept, reason)

    def _is_readable(self, file: Path) -> bool:
        try:
            return _read(file).numbers.get("run_id") == self.run_id
        except (OSError, ValueError):
            return False


def _prune(folder: Path, file: Path, server_round: int) -> None:
    """Delete the states that no message can ask for once ``file`` is that of this round."""
    for left in folder.glob(".*.tmp"):  # by a process that was killed as it wrote
        left.unlink(missing_ok=True)
    files = states_in(folder)
    saved = [f for f in files if f.name.startswith("round-") and (f == file or _round(f) < server_round)]
    before = [f for f in files if _round(f) < server_round]  # for a message that arrives twice
    for old in set(files) - {file, *before[:1], *saved[:KEPT_ROUNDS]}:
        old.unlink(missing_ok=True)


def _read(file: Path) -> State:
    """A state as its file has it. Raises OSError or ValueError where that cannot be read."""
    stamp, written = _WRITTEN.get(file, ((), State()))
    return _copy(written) if stamp == _stamp(file) else State.load(file)


def _copy(state: State) -> State:
    """Return a copy as it would be read from its file, with its tensors on the device where they are."""
    return State({name: t.detach().clone() for name, t in state.arrays.items()}, json.loads(json.dumps(state.numbers)))


def _stamp(file: Path) -> tuple[int, ...]:
    """What changes when a file does."""
    found = file.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def run_folder(run_id: str) -> str:
    """The name of a run's own folder. The server made the id: whatever it is, this is one name, and no way out."""
    known = RUN_FOLDER.fullmatch(f"run-{run_id}")
    return f"run-{run_id if known else hashlib.sha256(run_id.encode()).hexdigest()[:16]}"


def silo_folder(states: Path) -> Path:
    """The folder with the silo's name, of one that holds states: that itself, or the one above a run's own."""
    return states.parent if RUN_FOLDER.fullmatch(states.name) else states


def states_in(folder: Path) -> list[Path]:
    """The files of states that lie directly in a folder, newest round first."""
    return sorted(folder.glob("*-??????.safetensors"), key=_round, reverse=True)


def _round(file: Path) -> int:
    return int(file.stem.rpartition("-")[2])
