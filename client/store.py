"""Where a silo keeps its state between rounds.

In a simulation: in Flower's ``context.state``. Where the node config names a ``state-dir``: in files, one per round;
of the rounds that the server saves (``checkpoint-every``) the last two are kept, so that a server that resumes at an
earlier round finds the state it needs. The in-process engine uses both: memory from round to round, files for resume.
Each state carries the id of the run that made it; another run's is not taken up.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from logging import WARNING
from pathlib import Path
from typing import cast

from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.supercore import log

from client.silo import silo_name
from strategies.payload import array_record, tensor_of
from strategies.state import State

KEPT_ROUNDS = 2
BETWEEN = "between"  # begins the name of a state that no server checkpoint belongs to


class StateStore:
    """One silo's state of one run. ``run`` names the run's directory, ``key`` is ``STRATEGY-SEED``."""

    def __init__(self, context: Context, run: str, key: str, run_id: str) -> None:
        self.context, self.run_id = context, run_id
        config = context.node_config
        self.folder: Path | None = None
        if "state-path" in config:  # set by the in-process engine
            self.folder = Path(str(config["state-path"])) / silo_name(context)
        elif "state-dir" in config:
            # The server names the run; a name is all that it may be, not a way out of the directory.
            name = Path(run).name.replace("..", "_")
            self.folder = Path(str(config["state-dir"])) / name / key / silo_name(context)
        self.in_memory = "state-dir" not in config

    def load(self, server_round: int) -> State:
        """The newest state from before this round; an empty one where there is none of this run.

        Raises ValueError where all are of this round or later ones: starting afresh would delete them.
        """
        later = []
        for state in self._candidates():
            if state.numbers.get("run_id") == self.run_id:
                if state.numbers["round"] < server_round:
                    return state
                later.append(state.numbers["round"])
        if later and server_round > 1:
            raise ValueError(
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
            for left in self.folder.glob(".*.tmp"):  # by a process that was killed as it wrote
                left.unlink(missing_ok=True)
            files = self._files()
            saved = [f for f in files if f.name.startswith("round-") and _round(f) <= server_round]
            for old in set(files) - {file, *saved[:KEPT_ROUNDS]}:
                old.unlink(missing_ok=True)

    def _candidates(self) -> Iterator[State]:
        if self.in_memory and "numbers" in self.context.state:
            numbers = json.loads(cast(str, cast(ConfigRecord, self.context.state["numbers"])["json"]))
            record = cast(ArrayRecord, self.context.state["arrays"])
            yield State({name: tensor_of(array) for name, array in record.items()}, numbers)
        if self.folder is not None:
            damaged: Exception | None = None
            for file in self._files():
                try:
                    yield State.load(file)
                except (OSError, ValueError) as error:
                    log(WARNING, "%s, the one before it is taken", error)
                    damaged = error
            if damaged is not None:
                raise damaged

    def _files(self) -> list[Path]:
        """Newest round first."""
        assert self.folder is not None
        return sorted(self.folder.glob("*-??????.safetensors"), key=_round, reverse=True)


def _round(file: Path) -> int:
    return int(file.stem.rpartition("-")[2])
