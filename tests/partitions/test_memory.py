"""Free memory: of the machine, or of the container or job that this process is in, where that is less."""

from __future__ import annotations

import subprocess
import sys

import pytest

from client.protocol import private as at_the_site
from partitions.common import memory, sizes
from partitions.common.memory import UNKNOWN, available, available_share
from partitions.common.sizes import TooLargeError, check_size

GIB = 2**30
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


def group(folder, names, limit, use, inactive=0):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{use}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {inactive}\n")


@pytest.fixture
def root(tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(
        f"MemTotal: {16 * 2**20} kB\nMemAvailable: {8 * 2**20} kB\nMemFree: 1 kB\n"
    )
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    return tmp_path


def test_of_a_machine(root, tmp_path):
    assert available(root) == 8 * GIB and available_share(root) == 0.5
    assert available(tmp_path / "none") == UNKNOWN and available_share(tmp_path / "none") == 1.0


@pytest.mark.parametrize(
    "where, line, names, none",
    [
        ("sys/fs/cgroup", "0::/", V2, "max"),  # a container with a namespace of its own
        ("sys/fs/cgroup/user.slice/job", "0::/user.slice/job", V2, "max"),  # a batch job
        # Whose limit is a group around it
        ("sys/fs/cgroup/user.slice", "0::/user.slice/job", V2, "max"),
        ("sys/fs/cgroup/unified/job", "4:memory:/\n0::/job", V2, "max"),
        # The path is the host's
        ("sys/fs/cgroup/memory", "5:cpu:/x\n4:memory:/docker/5f", V1, 2**63 - 4096),
        ("sys/fs/cgroup/memory/slurm/job", "4:memory:/slurm/job", V1, 2**63 - 4096),
        ("sys/fs/cgroup/memory/slurm", "4:memory,hugetlb:/slurm/job", V1, 2**63 - 4096),
    ],
)
def test_of_a_group(root, where, line, names, none):
    (root / "proc/self/cgroup").write_text(f"{line}\n")
    group(root / where, names, 4 * GIB, 3 * GIB, GIB)
    assert available(root) == 2 * GIB and available_share(root) == 0.5
    group(root / where, names, 4 * GIB, 4 * GIB + 1)
    assert available(root) == 0 and available_share(root) == 0
    group(root / where, names, none, 3 * GIB)
    assert available(root) == 8 * GIB and available_share(root) == 0.5
    group(root / "sys/fs/cgroup/somebody/else", names, 1, 1)
    assert available(root) == 8 * GIB


def test_every_check_reads_it(root, monkeypatch):
    group(root / "sys/fs/cgroup", V2, GIB, GIB - 1000)
    monkeypatch.setattr(sizes, "available", lambda: memory.available(root))
    with pytest.raises(
        TooLargeError, match=r"a scan would take 0.0 GB of memory, and 0.0 GB is free here"
    ):
        check_size(2000, "a scan")
    assert 0 < at_the_site.available_share() <= 1
    assert abs(at_the_site.available_share() - available_share()) < 0.2


THREADS = """
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Lock
from partitions.common.memory import share_heap

def held():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))

def work(_):
    started.wait()  # no thread does the work of two
    with turn:
        blocks = [b"x" * 100_000 for _ in range(200)]
        left.append(blocks[-1])  # the end of its heap stays

share_heap()
turn, left, started, before = Lock(), [], Barrier(8), held()
with ThreadPoolExecutor(8) as threads:
    list(threads.map(work, range(8)))
print(held() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux counts")
def test_a_thread_uses_what_another_has_left():
    assert int(subprocess.check_output([sys.executable, "-c", THREADS], text=True)) < 50e6
