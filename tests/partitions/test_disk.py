"""Files that are there whole or not at all, and locks."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from failing import fails

from partitions.common.files import (
    fresh_folder,
    hold_lock,
    private,
    share_new_files,
    write_atomically,
)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    file = tmp_path / "new/file"
    write_atomically(file, "old")

    def fail(temporary):
        temporary.write_text("half of the n")
        raise OSError("the disk is full")

    fails(OSError, "full", write_atomically, file, fail)
    assert file.read_text() == "old" and os.listdir(file.parent) == ["file"]


@pytest.mark.parametrize(
    "mode, umask, found", [(None, 0o022, 0o644), (None, 0o077, 0o600), (0o600, 0, 0o600)]
)
def test_permissions(mode, umask, found, tmp_path):
    """From the first byte on nobody else reads the temporary file, whatever the file is to have in the end."""
    seen = []
    before = os.umask(umask)
    try:
        write_atomically(
            tmp_path / "file",
            lambda temporary: seen.append(temporary.stat().st_mode & 0o777),
            mode=mode,
        )
    finally:
        os.umask(before)
    assert seen == [0o600] and (tmp_path / "file").stat().st_mode & 0o777 == found


def modes(folder):
    """The permissions of all files and folders below, the folder's own too."""
    return {
        f"{'d' if p.is_dir() else '-'}{p.stat().st_mode & 0o777:o}"
        for p in (folder, *folder.rglob("*"))
    }


def write_all(folder):
    """A folder, a file and an atomically written one."""
    (folder / "new").mkdir()
    (folder / "new/file").touch()
    write_atomically(folder / "new/atomic", "1")
    fresh_folder(folder / "new/folder")
    return modes(folder / "new")


def test_what_is_written_is_its_users_alone_unless_asked_otherwise(
    tmp_path_factory, monkeypatch
):
    before = os.umask(0o022)
    try:
        with private():
            assert write_all(tmp_path_factory.mktemp("private")) == {"d700", "-600"}
        assert write_all(tmp_path_factory.mktemp("after")) == {"d755", "-644"}
        with share_new_files():
            assert write_all(tmp_path_factory.mktemp("shared")) == {"d777", "-666"}
        monkeypatch.setenv("SILOFL_SHARED", "1")
        with private():
            assert write_all(tmp_path_factory.mktemp("asked")) == {"d755", "-644"}
        os.umask(0)  # as in the server's container
        with private():
            assert write_all(tmp_path_factory.mktemp("container")) == {"d777", "-666"}
    finally:
        os.umask(before)


def test_temporary_names_cannot_be_known_before(tmp_path):
    """Whoever may write to the folder can put nothing in the way of the next write."""
    seen = set()
    for _ in range(2):
        write_atomically(tmp_path / "file", lambda temporary: seen.add(temporary.name))
        seen.add(fresh_folder(tmp_path / "folder").name)
    assert len(seen) == 4
    assert not any(str(os.getpid()) in name for name in seen)


def test_file_and_directory_are_synced(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(
        os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}"))
    )
    write_atomically(tmp_path / "file", b"1")
    assert len(synced) == 2 and synced[0].endswith(".file.tmp") and synced[1] == str(tmp_path)


def test_a_lock_is_held_against_other_processes_and_ends_with_its_own(tmp_path):
    lock = tmp_path / "lock"
    imports = "from partitions.common.files import hold_lock\nfrom pathlib import Path\n"
    hold = imports + f"with hold_lock(Path({str(lock)!r}), ''):\n"
    other = subprocess.Popen(
        [sys.executable, "-c", hold + "    print('held', flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert other.stdout is not None and other.stdout.readline() == "held\n"
    with (
        pytest.raises(ValueError, match="somebody else is at it"),
        hold_lock(lock, "somebody else is at it"),
    ):
        pass
    threading.Timer(0.3, other.kill).start()
    with hold_lock(lock, "it ends in time", patience=60):
        other.communicate(timeout=1)  # it has ended
    with hold_lock(lock, "free again"):
        pass
