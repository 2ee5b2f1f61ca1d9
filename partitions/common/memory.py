"""Free memory of the machine, or of the container or batch job where that is less (cgroup v1 and v2); its end; and
memory that a process gives back before its own end.

Standard library only, and no module of ours: client/protocol/private.py loads this file by its path.
"""

import ctypes
import errno
import mmap
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

UNKNOWN = 1 << 62  # bytes: on a system that says nothing
# Of cgroup v1 and v2: files with the limit and with the use, and the part of the use that the kernel can take back.
NAMES = (
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ("memory.max", "memory.current", "inactive_file"),
)
# Memory that ran out, in the words of PyTorch and CUDA. Python and NumPy raise MemoryError.
NO_ROOM = r"(?:can't|unable to|cannot|failed to) (?:m?map|allocate)|(?:out of|not enough) memory|ALLOC_FAILED"
M_ARENA_MAX = -8  # of glibc
ALLOCATION = re.compile(NO_ROOM, re.IGNORECASE)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out, of the machine, of its container, or of a GPU."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and bool(ALLOCATION.search(str(error)))
    )


def return_memory() -> None:
    """Give memory that is free in this process back to the system, where glibc can.

    What many small tensors have left stays with the process otherwise: a network's parameters, parts of a message.
    """
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def share_heap() -> None:
    """Have all threads to come share one heap of glibc's, so that each uses what parts of messages have left in it."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)


def clear_pages(address: int, size: int) -> None:
    """Set this process's own memory to zeros, whole pages of it, which take no room until they are written again."""
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = (address + size - start) // mmap.PAGESIZE
    with suppress(AttributeError, OSError):
        if pages > 0:
            place = ctypes.c_void_p(start), ctypes.c_size_t(pages * mmap.PAGESIZE)
            ctypes.CDLL(None).madvise(*place, mmap.MADV_DONTNEED)


def available(root: Path = Path("/")) -> int:
    """Return the free bytes of memory; a number without effect where they are unknown."""
    return max(min((free for free, _ in bounds(root)), default=UNKNOWN), 0)


def available_share(root: Path = Path("/")) -> float:
    """Return the free share of the scarcest memory, from 0 to 1."""
    return max(min((free / total for free, total in bounds(root) if total), default=1.0), 0.0)


def bounds(root: Path) -> Iterator[tuple[int, int]]:
    """Yield free and all bytes of the machine, and of each group with a limit that this process is in."""
    with suppress(OSError, ValueError, KeyError, IndexError):
        lines = dict(
            line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines()
        )
        free, total = (
            int(lines[key].split()[0]) * 1024 for key in ("MemAvailable", "MemTotal")
        )
        yield free, total
    for group in groups(root):
        for limit, use, inactive in NAMES:
            with suppress(OSError, ValueError, KeyError):
                # "max": no limit
                most, used = (int((group / name).read_text()) for name in (limit, use))
                parts = dict(
                    line.split() for line in (group / "memory.stat").read_text().splitlines()
                )
                if most < UNKNOWN:
                    yield most - used + int(parts[inactive]), most


def groups(root: Path) -> Iterator[Path]:
    """Yield the folders of this process's memory groups, each with the groups around it."""
    second, unified, memory = (
        root / f"sys/fs/cgroup{end}" for end in ("", "/unified", "/memory")
    )
    tops = dict.fromkeys((second, unified, memory), "")
    with suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if kinds == "":
                tops[second] = tops[unified] = path
            elif "memory" in kinds.split(","):
                tops[memory] = path
    for top, path in tops.items():
        # In a container without a namespace of its own, the path is the host's: only the top is there.
        inner = top / path.strip("/")
        yield from (
            folder
            for folder in (inner, *inner.parents)
            if folder.is_relative_to(top) and folder.is_dir()
        )
