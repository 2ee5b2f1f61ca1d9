"""The storage of a silo's state between rounds.

In a simulation it is Flower's ``context.state``. If the node config has a ``state-dir``, it is one file per round. Kept
are the last three of the rounds that the server saves (``checkpoint-every``): a server that returns to its last
checkpoint but one, in the middle of a round, finds the states it needs. The third goes before the next one is written.
The last state before this round is kept too, so that a message that arrives twice finds the same state. The in-process
engine uses both: memory from round to round, files for resume. Each state contains the id of its run; another run's is
not used. A damaged state is reported: the server decides what to do (``server/run/checkpoints.py``). States share no
file: damaged, it would take two of them, and the run could not go back.

    STATE_DIR/RUN/STRATEGY-SEED/SILO/run-ID/round-000007.safetensors

An app's process (``client/site/runtime/app_process.py``) also keeps the last state in memory. It does not
read the file again while that is the one it wrote.

The server chooses a run's name, and may reuse one. The folder of the run's id keeps the runs apart, so that no run
deletes or overwrites another one's states. (The run directory of a simulation contains one run.)
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from logging import WARNING
from pathlib import Path
from typing import cast

from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.common import log

from client.local_data import silo_name
from client.reported import CANDIDATE, REPORTED
from partitions.common.errors import DataError, UserError
from partitions.common.names import unknown_name
from strategies.base.state import FIRST, State, map_arrays
from strategies.base.transport.payload import array_record, tensor_of
from strategies.base.transport.reporting import DamagedStateError

KEPT_ROUNDS = 2  # before this one: those of the server's two checkpoints
BETWEEN = "between"  # prefix of states without a server checkpoint
RUN_FOLDER = re.compile(r"run-[0-9a-f]{16}")
# The last written file, its stamp then, its content, and how often each array had been written to.
_WRITTEN: dict[Path, tuple[tuple[int, ...], State, dict[str, int]]] = {}
# Models that are mapped from the file, and take no memory of their own: those that a round only carries on or copies
# (APPLE's cores), and the first one in the file.
CARRIED = (FIRST, "best", "core", REPORTED, CANDIDATE)


class StateStore:
    """One silo's state of one run. ``run``: the run directory's name; ``key``: ``STRATEGY-SEED``."""

    def __init__(self, context: Context, run: str, key: str, run_id: str) -> None:
        self.context = context
        # Flower's own number, if the server's loop is not ours
        self.run_id = run_id or f"{context.run_id:016x}"
        config = context.node_config
        self.folder: Path | None = None
        if "state-path" in config:  # set by the in-process engine
            self.folder = Path(str(config["state-path"])) / silo_name(context)
        elif "state-dir" in config:
            # The server chooses the name: reduce it to one path component, so that it cannot leave the directory.
            name = Path(run).name.replace("..", "_")
            of_silo = Path(str(config["state-dir"])) / name / key / silo_name(context)
            self.folder = of_silo / run_folder(self.run_id)
        self.in_memory = "state-dir" not in config
        # Of the last load: its round, the round of its state, and whether a damaged one was left out
        self.round, self.base, self.damaged = 0, 0, False

    def load(
        self,
        server_round: int,
        lost: int = 0,
        first: int = 1,
        sums: Sequence[str] | None = None,
    ) -> State:
        """Return the newest state from before this round; an empty one if there is none of this run.

        ``sums``: those of the run that this silo is in, the newest first: no state of another training is taken. Raises
        DataError if that of the newest is gone, or was written over; one that is damaged is the disk's fault.

        Damaged states of rounds up to ``lost`` are skipped: the server counts them as lost. Any other damaged one
        raises DamagedStateError. Raises DataError if all states are of this round or later ones, since a fresh start
        would delete them; not in the ``first`` round that the silo takes part in, which is repeated.
        """
        later, self.round, self.damaged = [], server_round, False
        for state in self._candidates(server_round, lost):
            if state.numbers.get("run_id") == self.run_id:
                if sums is not None and state.numbers.get("sum") not in sums:
                    continue
                if sums and state.numbers["sum"] != sums[0] and not self.damaged:
                    break
                if state.numbers["round"] < server_round:
                    self.base = state.numbers["round"]
                    return state
                later.append(state.numbers["round"])
        if sums and not self.damaged:
            raise DataError("its state after the last sum that it is in is not here any more")
        if later and server_round > first:
            raise DataError(
                f"the server resumes at round {server_round}, this silo has kept its state of round {min(later)} and "
                f"later only: it waits for round {min(later) + 1}"
            )
        return State()

    def save(self, state: State, server_round: int, *, to_disk: bool, of: str = "") -> None:
        """Save ``state`` for this round. States of later rounds are deleted: those rounds are being repeated.

        ``of``: the masked sum that its training is for; states of trainings since :meth:`load` are deleted, too.
        """
        state.numbers |= {"run_id": self.run_id, "round": server_round}
        state.numbers |= {"sum": of} if of else {}
        if self.in_memory:
            self.context.state["arrays"] = array_record(state.arrays)
            self.context.state["numbers"] = ConfigRecord({"json": json.dumps(state.numbers)})
        if self.folder is not None and (to_disk or not self.in_memory):
            kind = "round" if to_disk else BETWEEN
            file = self.folder / f"{kind}-{server_round:06d}.safetensors"
            if not of and not self.damaged:  # before the new one takes room
                _prune(self.folder, file, max(self.round, server_round))
            state.save(file)
            if not self.in_memory:
                _WRITTEN.clear()
                _WRITTEN[file] = _stamp(file), *_map_state(file, state)
            if of:
                for left in states_in(self.folder):
                    if self.base < _round(left) < server_round:
                        left.unlink(missing_ok=True)
            _prune(self.folder, file, server_round)

    def _candidates(self, server_round: int, lost: int) -> Iterator[State]:
        if self.in_memory and "numbers" in self.context.state:
            numbers = json.loads(
                cast(str, cast(ConfigRecord, self.context.state["numbers"])["json"])
            )
            record = cast(ArrayRecord, self.context.state["arrays"])
            yield State({name: tensor_of(array) for name, array in record.items()}, numbers)
        files = states_in(self.folder) if self.folder else []
        for place, file in enumerate(files):
            try:
                state = _read(file)
            except (OSError, ValueError) as error:
                if lost < _round(file) < server_round:
                    raise self._damage(files, place, error) from error
                self.damaged = True
            else:
                yield state

    def _damage(self, files: Sequence[Path], place: int, error: Exception) -> DamagedStateError:
        """Describe the damaged state ``files[place]``, and the states before it, for the server."""
        good = next(
            (i for i in range(place + 1, len(files)) if self._is_readable(files[i])), place + 1
        )
        kept = [_round(file) for file in itertools.takewhile(self._is_readable, files[good:])]
        # States are only removed when there are later ones, so this is the first
        if len(files) == 1:
            kept = [0]
        reason = str(error)
        # The path goes only to the hospital's own log
        if "state-path" not in self.context.node_config:
            log(WARNING, "%s", error)
            reason = f"{files[place].name} cannot be read"
        return DamagedStateError(_round(files[good - 1]), kept, reason)

    def _is_readable(self, file: Path) -> bool:
        try:
            return _read(file).numbers.get("run_id") == self.run_id
        except (OSError, ValueError):
            return False


def _prune(folder: Path, file: Path, server_round: int) -> None:
    """Delete the states that no message can need now that the state of this round, ``file``, is there, or comes."""
    for left in folder.glob(".*.tmp"):  # left by a process that was killed while writing
        left.unlink(missing_ok=True)
    files = states_in(folder)
    before = [f for f in files if _round(f) < server_round]  # for a message that arrives twice
    saved = [f for f in before if f.name.startswith("round-")]
    for old in set(files) - {file, *before[:1], *saved[:KEPT_ROUNDS]}:
        old.unlink(missing_ok=True)


def _read(file: Path) -> State:
    """Return the state in a file. Raises OSError or ValueError if it cannot be read."""
    stamp, written, versions = _WRITTEN.get(file, ((), State(), {}))
    if stamp == _stamp(file) and versions == _versions(written):
        return written.copy()
    return State.load(file)


def _map_state(file: Path, state: State) -> tuple[State, dict[str, int]]:
    """Return the state in a file that was just written, without a copy of an array, and :func:`_versions` of it."""
    kept = state.copy()
    kept.arrays = {name: tensor.detach() for name, tensor in kept.arrays.items()}
    carried = [
        name
        for name, tensor in kept.arrays.items()
        if name.partition(".")[0] in CARRIED and tensor.device.type == "cpu"
    ]
    kept.arrays |= map_arrays(file, carried)
    return kept, _versions(kept)


def _versions(state: State) -> dict[str, int]:
    """Return how often each array has been written to; after a write it differs from its file."""
    return {name: tensor._version for name, tensor in state.arrays.items()}


def _stamp(file: Path) -> tuple[int, ...]:
    """Return a value that changes with the file."""
    stat = file.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def run_folder(run_id: str) -> str:
    """Return the name of a run's own folder: one path component, whatever id the server sent."""
    known = RUN_FOLDER.fullmatch(f"run-{run_id}")
    return f"run-{run_id if known else hashlib.sha256(run_id.encode()).hexdigest()[:16]}"


def silo_folder(states: Path) -> Path:
    """Return the folder with the silo's name, for a folder of states: itself, or the parent of a run's own."""
    return states.parent if RUN_FOLDER.fullmatch(states.name) else states


def states_in(folder: Path) -> list[Path]:
    """Return the state files directly in a folder, newest round first."""
    return sorted(folder.glob("*-??????.safetensors"), key=_round, reverse=True)


def _round(file: Path) -> int:
    return int(file.stem.rpartition("-")[2])


# --- the search for a silo's states ---


# Places of a silo's states: below a run directory; below a silo's state-dir, or one run, method or silo of it.
FOLDERS = ("checkpoint/*/silos/*", "*/*/*/*", "*/*/*", "*/*", "*", ".")


def find_states(
    source: Path, silo: str, strategy: str | None, seed: int | None, run_id: str = ""
) -> Path:
    """Return the only folder below ``source`` with this silo's states, ``.../STRATEGY-SEED/[silos/]NAME[/run-ID]``."""
    if not source.is_dir():
        raise UserError(
            f"there is no directory {source}: name a run directory, or a silo's state directory"
        )
    root = source.resolve()
    states = {
        file.parent
        for pattern in FOLDERS
        for file in root.glob(f"{pattern}/round-*.safetensors")
    }
    if not states:
        raise UserError(
            f"{source} holds no silo's state: name a run directory, or a silo's state directory"
        )
    of_silo = sorted(folder for folder in states if silo_folder(folder).name == silo)
    if not of_silo:
        known = {silo_folder(folder).name for folder in states}
        raise UserError(str(unknown_name(f"silo in {source}:", silo, known)))
    chosen = [
        folder
        for folder in of_silo
        if matches(run_key(folder), strategy, seed) and of_run(folder, run_id)
    ]
    if len(chosen) == 1:
        return chosen[0]
    twins = Counter(run_label(folder, root) for folder in (chosen or of_silo))
    names = ", ".join(distinct_label(folder, root, twins) for folder in (chosen or of_silo))
    if chosen:
        how = (
            "--run-id"
            if len(twins) == 1
            else "--strategy and --seed, or name one run's directory"
        )
        raise UserError(f"{source} holds several models of {silo}: {names}; choose with {how}")
    conditions = (
        strategy,
        None if seed is None else f"seed {seed}",
        f"run-id {run_id}" if run_id else None,
    )
    wanted = " ".join(str(v) for v in conditions if v is not None)
    raise UserError(f"{source} holds no model of {silo} by {wanted}; there are: {names}")


def run_key(folder: Path) -> str:
    """Return ``STRATEGY-SEED`` of a folder of states."""
    above = silo_folder(folder).parent
    return (above.parent if above.name == "silos" else above).name


def run_label(folder: Path, root: Path) -> str:
    """Return a folder's label for messages: ``RUN/STRATEGY-SEED``, with RUN only if it is below ``root``."""
    above = silo_folder(folder).parent
    parts = above.relative_to(root).parts if above.is_relative_to(root) else ()
    return "/".join(part for part in parts if part not in ("checkpoint", "silos")) or run_key(
        folder
    )


def distinct_label(folder: Path, root: Path, twins: Mapping[str, int]) -> str:
    """Return the label; if several runs share it, with the id and the time of the last state."""
    label = run_label(folder, root)
    if twins[label] == 1:
        return label
    last = max(file.stat().st_mtime for file in folder.glob("round-*.safetensors"))
    return f"{label} ({folder.name}, {time.strftime('%Y-%m-%d %H:%M', time.localtime(last))})"


def of_run(folder: Path, run_id: str) -> bool:
    """Return whether a folder of states belongs to a run whose id begins with ``run_id``."""
    return not run_id or folder.name.startswith(f"run-{run_id.removeprefix('run-')}")


def matches(key: str, strategy: str | None, seed: int | None) -> bool:
    """Return whether ``STRATEGY-SEED`` matches the wanted strategy and seed."""
    name, _, number = key.rpartition("-")
    return strategy in (None, name) and (seed is None or str(seed) == number)
