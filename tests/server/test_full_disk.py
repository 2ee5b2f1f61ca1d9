"""A disk that is full is the user's to mend: one line, nothing half-written, no silo left out, and the run goes on."""

from __future__ import annotations

import errno
import os
import resource

import pytest
from taken import silofl
from tiny import history_without_seconds

from partitions.common import files
from partitions.common.files import append, is_full, write_atomically

SMALL = (
    "simulate --strategy fedavg,local --dataset breast-cancer --silos 3 --rounds 3 "
    "--set partition=iid threads=1"
)


@pytest.fixture
def room():
    """No file may have more than 1000 bytes, as the operating system has it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_does_not_fit_is_not_written_in_part(tmp_path, room):
    file = tmp_path / "rows"
    append(file, "a" * 900)
    for write in (lambda: append(file, "b" * 900), lambda: write_atomically(file, "c" * 1001)):
        with pytest.raises(OSError, match="too large") as caught:
            write()
        assert is_full(caught.value) and caught.value.filename == str(file)
    assert file.read_text() == "a" * 900
    assert list(tmp_path.iterdir()) == [file]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run with a disk that is never full."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    assert silofl(*SMALL.split(), "--out", out) == 0
    return out


@pytest.mark.parametrize(
    "full", ["silos/hospital-02", "history.csv", "server.safetensors", "progress.jsonl"]
)
def test_a_simulation_on_a_full_disk_stops_and_is_resumed(
    whole, tmp_path, full, monkeypatch, capsys
):
    """In the second round of the first method, wherever the disk is full: the same history bit for bit."""
    capsys.readouterr()
    run, count = tmp_path / "run", 0

    def no_room(path):
        nonlocal count
        count += full in str(path)
        if count > 1 and full in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        sync, add = files.sync, files.append

        def sync_or_fail(path):
            no_room(path)
            sync(path)

        patch.setattr(files, "sync", sync_or_fail)

        def append_or_fail(path, text, *, durable=True):
            try:
                no_room(path)
            except OSError as error:
                raise files.name_file(error, path) from None
            add(path, text, durable=durable)

        for module in ("server.results.history", "server.results.run_directory"):
            patch.setattr(f"{module}.append", append_or_fail)
        assert silofl(*SMALL.split(), "--out", run) == 2
    said = capsys.readouterr().err.splitlines()
    lines = [line for line in said if line and "round/s" not in line]
    assert (
        len(lines) == 1
        and full in lines[0]
        and "No space left on device; free some, then continue" in lines[0]
    )
    assert "rejected" not in (run / "history.csv").read_text() and not list(run.rglob(".*.tmp"))
    assert silofl(*f"{SMALL} resume=true --out {run}".split()) == 0
    assert history_without_seconds(run) == history_without_seconds(whole)
