"""A run that is killed and resumed, held against one that was not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import Files, Run, comparable, federate, round_of, same
from torch import Tensor

from client.store import silo_folder
from server.results.history import History
from server.run.reporter import Progress
from strategies.base.state import State


class Crash(BaseException):
    """Nothing in the product catches it, as it does not catch a power cut."""


def crash_after(last: int) -> Callable[[Progress], None]:
    """Right after round ``last`` is saved."""

    def watch(progress: Progress) -> None:
        if progress.round == last:
            raise Crash

    return watch


def interrupted(files: Files, directory: Path, **changes: Any) -> None:
    with pytest.raises(Crash):
        federate(files, directory=directory, **changes)


def personal_models(directory: Path) -> dict[str, dict[str, Tensor]]:
    """Each silo's newest state on disk."""
    folders = sorted({p.parent for p in directory.rglob("round-*.safetensors")})
    return {silo_folder(f).name: State.load(max(f.glob("round-*"))).arrays for f in folders}


def assert_equal(whole: Run, resumed: Run, directories: tuple[Path, Path]) -> None:
    """The rows in memory and in the files, the server's state, and all that the silos keep."""
    assert comparable(resumed.rows) == comparable(whole.rows)
    written = [History(d / "history.csv").rows for d in directories]
    assert comparable(written[0]) == comparable(written[1]) == comparable(whole.rows)
    ours, theirs = whole.strategy.state, resumed.strategy.state
    assert ours.numbers == theirs.numbers
    assert ours.arrays.keys() == theirs.arrays.keys()
    assert all(same(ours.arrays[k], theirs.arrays[k]) for k in ours.arrays)
    kept = [personal_models(d) for d in directories]
    assert kept[0].keys() == kept[1].keys() != set()
    for silo in kept[0]:
        # It has not trained yet
        own = {"personal", "best"} if "personal" in kept[0][silo] else {"candidate"}
        assert kept[0][silo].keys() == kept[1][silo].keys() >= own
        assert all(same(kept[0][silo][k], kept[1][silo][k]) for k in kept[0][silo])


def assert_resumes(files: Files, folder: Path, last: int, **options: Any) -> Run:
    """A run that breaks off after round ``last`` and is resumed leaves what a whole one does, which is returned."""
    directories = folder / "whole", folder / "parts"
    whole = federate(files, directory=directories[0], **options)
    interrupted(files, directories[1], watch=crash_after(last), **options)
    resumed = federate(files, directory=directories[1], resume=True, **options)
    assert min({round_of(message) for message, _ in resumed.grid.traffic} - {0}) == last + 1
    assert_equal(whole, resumed, directories)
    return whole
