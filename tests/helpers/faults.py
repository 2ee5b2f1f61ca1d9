"""What drills do to a federation: hold it at a chosen place, cut lines, fill disks, shift clocks, slow a silo down."""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from trio import bring_up, end_silo, reach_over, text_of, wait_for

from client.protocol.launch import LOOPBACK

HERE = Path(__file__).parent


class Gate:
    """Holds the process that comes to a place (`gate/sitecustomize.py`) until it is opened.

    A place is a part of the federation, a file and a function, in one line.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder, self.place, self.here = folder, folder / "place", folder / "here"

    def environment(self, places: Mapping[str, str]) -> dict[str, str]:
        """What all processes of the federation must have inherited."""
        functions = {place.split()[2].rpartition(".")[2] for place in places.values()}
        path = [str(HERE / "gate"), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            "PYTHONPATH": os.pathsep.join(path),
            "SILOFL_GATE": str(self.folder),
            "SILOFL_GATE_FUNCTIONS": " ".join(sorted(functions)),
        }

    def wait_at(self, place: str) -> int:
        """The number of the process that is the next to come there, and now waits."""
        self.here.unlink(missing_ok=True)
        fresh = self.folder / "fresh"
        fresh.write_text(place)
        fresh.rename(self.place)
        wait_for(lambda: bool(text_of(self.here)), 120)
        return int(text_of(self.here))

    def open(self) -> None:
        self.place.unlink(missing_ok=True)


class CutLine:
    """A line between a silo and its server that can be cut: what is sent then arrives when it is mended, or never.

    It can be slow, with so many bytes a second each way and seconds of delay, and counts the bytes that have come
    through it ``up`` to the server and ``down``. Where it is broken its connections end and no other is made.
    """

    def __init__(self, port: int, rate: float = 0.0, delay: float = 0.0) -> None:
        self.server, self.rate, self.delay = port, rate, delay
        self.whole = threading.Event()
        self.whole.set()
        self.left: int | None = None  # bytes that still go up to the server before it is cut
        self.passed = {True: 0, False: 0}  # up, down
        self.free = {True: 0.0, False: 0.0}  # when the line has sent what it was given
        self.lock, self.ends = threading.Lock(), list[socket.socket]()
        self.broken = False
        self.listener = socket.create_server((LOOPBACK, 0))
        if rate:  # a line's own memory is small: what waits, waits in the sender
            self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 17)
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def up(self) -> int:
        return self.passed[True]

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self.listener.accept()
                if self.broken:
                    near.close()
                    continue
                far = socket.create_connection((LOOPBACK, self.server))
                self.ends += [near, far]
                for one, other, up in ((near, far, True), (far, near, False)):
                    threading.Thread(
                        target=self._pass_on, args=(one, other, up), daemon=True
                    ).start()

    def _pass_on(self, one: socket.socket, other: socket.socket, up: bool) -> None:
        late: queue.Queue[tuple[float, bytes]] = queue.Queue(64)
        if self.delay:
            threading.Thread(target=self._deliver, args=(late, other), daemon=True).start()
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 14 if self.rate else 1 << 16):
                if up and self.left is not None:
                    self.left -= len(data)
                    if self.left < 0:
                        other.sendall(data[: self.left])
                        data, self.left = data[self.left :], None
                        self.whole.clear()
                self.whole.wait()
                self._take_time(len(data), up)
                if self.delay:
                    late.put((time.monotonic() + self.delay, data))
                else:
                    other.sendall(data)
        if self.delay:
            late.put((0.0, b""))
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _take_time(self, size: int, up: bool) -> None:
        with self.lock:
            self.passed[up] += size
            if not self.rate:
                return
            self.free[up] = max(self.free[up], time.monotonic()) + size / self.rate
            until = self.free[up]
        time.sleep(max(0.0, until - time.monotonic()))

    def _deliver(self, late: queue.Queue[tuple[float, bytes]], other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while (found := late.get())[1]:
                time.sleep(max(0.0, found[0] - time.monotonic()))
                other.sendall(found[1])

    def break_for(self, seconds: float) -> None:
        """As a router that has lost its power: all connections end, and there are none for so long."""
        self.broken = True
        for end in self.ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self.ends.clear()
        time.sleep(seconds)
        self.broken = False

    def close(self) -> None:
        self.whole.set()
        self.listener.close()


@contextlib.contextmanager
def over_a_line(folder: Path, **given: float) -> Iterator[CutLine]:
    """The federation with hospital-02 behind a line, until it is ended."""
    running = bring_up(folder)
    line = CutLine(running.fleet_port, **given)
    reach_over(running, line.port)
    yield line
    line.close()
    end_silo(running)


class SmallDisk:
    """A disk of some megabytes that can be full, in place of a folder, whose files it has."""

    def __init__(self, path: Path) -> None:
        self.path, self.filler = path, path / "filler"
        path.mkdir(parents=True, exist_ok=True)
        mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(path)]
        if os.geteuid() != 0 or self._run_with_files(mount):
            pytest.skip("nobody but root makes a disk")

    def _run_with_files(self, command: list[str]) -> int:
        """Return the exit code of a command after which the folder has the same files."""
        with tempfile.TemporaryDirectory() as kept:
            shutil.copytree(self.path, kept, dirs_exist_ok=True)
            code = subprocess.run(command, check=False, capture_output=True).returncode
            shutil.copytree(kept, self.path, dirs_exist_ok=True)
        return code

    def fill(self) -> None:
        with contextlib.suppress(OSError), self.filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 10))

    def free(self) -> None:
        self.filler.unlink()

    def remove(self) -> None:
        assert self._run_with_files(["umount", "-l", str(self.path)]) == 0


class SetClock:
    """The wall clock of the processes that are started with its environment (`clock.c`)."""

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("cc")
        if compiler is None:
            pytest.skip("no C compiler: nothing shifts a clock")
        self.offset, library = folder / "offset", folder / "clock.so"
        self.set(0)
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-o", library, HERE / "clock.c"], check=True
        )
        self.environment = {"LD_PRELOAD": str(library), "CLOCK_OFFSET": str(self.offset)}

    def set(self, seconds: int) -> None:
        """It is off by so many seconds from now on."""
        with self.offset.open("r+b" if self.offset.exists() else "wb") as file:
            file.write(struct.pack("l", seconds))


@contextlib.contextmanager
def slowed(log: Path) -> Iterator[None]:
    """Whoever writes to this log gets a tenth of the time: a silo whose machine is ten times slower."""
    fast = threading.Event()

    def tell(number: int) -> None:
        for path in Path("/proc").glob("[0-9]*/fd/1"):
            with contextlib.suppress(OSError):
                if path.readlink() == log:
                    os.kill(int(path.parts[2]), number)

    def slow() -> None:
        while not fast.is_set():
            tell(signal.SIGSTOP)
            fast.wait(0.45)
            tell(signal.SIGCONT)
            time.sleep(0.05)

    thread = threading.Thread(target=slow)
    thread.start()
    try:
        yield
    finally:
        fast.set()
        thread.join()
