"""Append-only files of lines at a site, in which every line contains the hash of the line before.

    FOLDER/KIND-000001.jsonl  KIND-000002.jsonl ...    a line per entry, in JSON
    FOLDER/head.json                                   number and hash of the last line

A line is on the disk before :meth:`Chain.append` returns. Its `hash` is the SHA-256 of the line up to there, and
`previous` is the `hash` of the line before. So `verify` finds and names a line that was changed, removed or moved;
`head.json` reveals lines that were cut off at the end. A line that was torn by a crash is left as it is. The next line
notes its SHA-256 as `torn`, and follows the last whole line.

The audit log (`audit.py`) and the ledger of a privacy budget (`../budget/ledger.py`) are such chains.

Standard library only: the process that runs the app loads this file (see `private.py`).
"""

import contextlib
import fcntl
import fnmatch
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from .ours import files

LARGEST = 2 << 20  # bytes, after which the next file is begun
BLOCK = 1 << 13  # bytes read at once from a file's end
START = "0" * 64  # `previous` of the first line
END = b',"hash":"'
# Fields of every line of every chain, beside `torn`
EVERY = frozenset({"line", "previous", "time", "hash"})


class Chain:
    """The chain in one folder, for a process that writes to it."""

    kind: ClassVar[str]  # prefix of its files' names
    required: ClassVar[frozenset[str]]  # fields of every line

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Lock the chain against other processes. Raises OSError if the folder is not writable."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def append(self, entry: Mapping[str, Any]) -> tuple[int, str]:
        """Write one line and wait until it is on the disk; return its number and hash.

        Raises OSError if that fails; then nothing may leave.
        """
        with self.hold():
            return self.write(entry)

    def write(self, entry: Mapping[str, Any]) -> tuple[int, str]:
        """Write one line, as :meth:`append` does, in a process that already holds the lock."""
        number, before, torn = self.end()
        head = {"line": number + 1, "previous": before} | (
            {"torn": digest(torn)} if torn else {}
        )
        file = self._file()
        entry, note = self.complete(entry, number + 1, file.name)
        text, own_hash = chain_line({**head, **entry})
        append_line(file, text)
        # An older head tells of fewer lines, which is no fault; so its new name need not be on the disk.
        head_text = json.dumps({"line": number + 1, "hash": own_hash, **note}) + "\n"
        write_whole(self.folder / "head.json", head_text, sync_name=False)
        return number + 1, own_hash

    def complete(
        self, entry: Mapping[str, Any], number: int, file: str
    ) -> tuple[Mapping[str, Any], dict[str, Any]]:
        """Return the entry as written in this line of this file, and what `head.json` notes in addition."""
        return entry, {}

    def verify(self, first: int = 1) -> "ChainVerdict":
        """Read the chain and verify it from line `first` on; earlier lines may be kept elsewhere."""
        return verify_chain(self.folder, first, self.kind, self.required)

    def end(self) -> tuple[int, str, bytes]:
        """Return number and hash of the last line, and the text after it that is no line."""
        torn: list[bytes] = []
        number, before = read_head(self.folder) or (0, START)
        files = chain_files(self.folder, self.kind)[-2:]
        for text in (text for file in reversed(files) for text in last_first(file)):
            entry = parse_line(text, self.required)
            if entry is not None:
                # Otherwise written lines are missing; `verify` reports them
                if entry["line"] >= number:
                    number, before = entry["line"], entry["hash"]
                break
            torn.append(text)
        return number, before, b"\n".join(reversed(torn)).strip(b"\n")

    def _file(self) -> Path:
        """Return the file for the next line."""
        files = chain_files(self.folder, self.kind)
        last = files[-1] if files else self.folder / file_name(1, self.kind)
        if files and last.stat().st_size >= LARGEST:
            last = self.folder / file_name(number_of(last) + 1, self.kind)
        return last


def chain_line(entry: Mapping[str, Any]) -> tuple[bytes, str]:
    """Return the line of an entry, which ends with its own hash, and that hash."""
    body = json.dumps(entry, separators=(",", ":")).encode()[:-1]
    own_hash = digest(body)
    return body + END + own_hash.encode() + b'"}', own_hash


def parse_line(text: bytes, required: frozenset[str] = EVERY) -> dict[str, Any] | None:
    """Return the entry of a line with a correct hash; None for any other text."""
    body, _, own_hash = text.rpartition(END)
    if own_hash != digest(body).encode() + b'"}':
        return None
    try:
        entry: dict[str, Any] = json.loads(text)
    except ValueError:
        return None
    return entry if entry.keys() >= required and isinstance(entry["line"], int) else None


def utc_now() -> str:
    """Return the time in the form that all lines and signed texts have."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def digest(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def canonical(values: Mapping[str, Any]) -> bytes:
    """Return values as canonical text: equal values give equal text."""
    return json.dumps(values, sort_keys=True, default=lambda value: value.hex()).encode()


# --- files ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LinePlace:
    """A line's text and its position."""

    file: str
    number: int
    text: bytes

    def __str__(self) -> str:
        return f"{self.file}, line {self.number}"


def file_name(number: int, kind: str) -> str:
    return f"{kind}-{number:06d}.jsonl"


def number_of(file: Path) -> int:
    return int(file.stem.rpartition("-")[2])


def chain_files(folder: Path, kind: str) -> list[Path]:
    """Return the chain's files, the oldest first."""
    try:
        names = fnmatch.filter(os.listdir(folder), f"{kind}-[0-9]*.jsonl")
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [folder / name for name in sorted(names, key=lambda name: (len(name), name))]


def lines(files: Sequence[Path]) -> Iterator[LinePlace]:
    """Yield all lines of these files, including an unterminated last one."""
    for file in files:
        parts = file.read_bytes().split(b"\n")
        for number, text in enumerate(parts if parts[-1] else parts[:-1], 1):
            yield LinePlace(file.name, number, text)


def last_first(file: Path) -> Iterator[bytes]:
    """Yield the lines of a file from its end, including an unterminated one; the file is read lazily."""
    with file.open("rb") as stream:
        start = stream.seek(0, os.SEEK_END)
        rest, at_end = b"", True
        while start:
            size = min(start, BLOCK)
            start = stream.seek(start - size)
            rest, *whole = (stream.read(size) + rest).split(b"\n")
            if at_end and whole and not whole[-1]:
                whole.pop()
            at_end = False
            yield from reversed(whole)
        if not at_end:
            yield rest


def read_head(folder: Path) -> tuple[int, str] | None:
    """Return number and hash of the last written line from `head.json`; None if it is missing or unreadable."""
    try:
        head = json.loads((folder / "head.json").read_text())
        return int(head["line"]), str(head["hash"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def append_line(file: Path, text: bytes) -> None:
    """Append a line to a file of this user alone, as `append` of `partitions/common/files.py` does."""
    files.append(file, text + b"\n", mode=0o600, whole=True)


def write_whole(path: Path, text: str, *, sync_name: bool = True) -> None:
    """Write a file of this user alone, as `write_atomically` of `partitions/common/files.py` does."""
    files.write_atomically(path, text, mode=0o600, sync_name=sync_name)


# --- verification -----------------------------------------------------------------------------------------


@dataclass
class ChainVerdict:
    """Result of `verify`: the readable entries, the faults, and notes that are no faults."""

    entries: list[dict[str, Any]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def verify_chain(folder: Path, first: int, kind: str, required: frozenset[str]) -> ChainVerdict:
    """Read a chain and verify it from line `first` on; earlier lines may be kept elsewhere."""
    head = read_head(folder)  # first: another process may append meanwhile
    verdict = ChainVerdict()
    expected, before, unread = first, START if first == 1 else "", list[LinePlace]()
    for place in lines(chain_files(folder, kind)):
        entry = parse_line(place.text, required)
        if entry is None:
            unread.append(place)
            continue
        if changed := _check_unread(verdict, unread, entry.get("torn")):
            # The hash before the next line is unknown
            expected, before = expected + changed, ""
        unread = []
        number = entry["line"]
        if number > expected:
            gone = (
                f"line {expected} is"
                if number == expected + 1
                else f"lines {expected} to {number - 1} are"
            )
            verdict.faults.append(f"{place}: {gone} missing before line {number}")
        elif number < expected:
            verdict.faults.append(
                f"{place}: line {number} stands behind line {expected - 1}: moved, or written twice"
            )
        elif before and entry["previous"] != before:
            verdict.faults.append(
                f"{place}: line {number} does not follow from the line before it: one was replaced"
            )
        if number >= expected:
            expected, before = number + 1, entry["hash"]
        verdict.entries.append(entry)
    if head is None and _begins(folder, verdict):
        return verify_chain(folder, first, kind, required)
    _check_end(verdict, head, unread, expected)
    return verdict


def _begins(folder: Path, verdict: ChainVerdict) -> bool:
    """Return whether another process is writing the first line just now, and its head after it."""
    until = time.monotonic() + 1.0 if len(verdict.entries) == 1 else 0.0
    while not (there := (folder / "head.json").exists()) and time.monotonic() < until:
        time.sleep(0.02)
    return there and bool(verdict.entries) and read_head(folder) is not None


def _check_unread(verdict: ChainVerdict, unread: Sequence[LinePlace], torn: str | None) -> int:
    """Return how many lines an unreadable text was: 0 if the next line notes it as torn by a crash, else changed."""
    if not unread:
        return 0
    if torn == digest(b"\n".join(place.text for place in unread).strip(b"\n")):
        verdict.notes.append(
            f"{unread[0]}: torn by a crash; its message did not leave, and the next line says so"
        )
        return 0
    verdict.faults += [f"{place}: changed, its hash is wrong" for place in unread]
    return len(unread)


def _check_end(
    verdict: ChainVerdict,
    head: tuple[int, str] | None,
    unread: Sequence[LinePlace],
    expected: int,
) -> None:
    """Compare the last lines with `head.json`."""
    if head is None:
        if verdict.entries or unread:
            verdict.faults.append(
                "head.json: missing or damaged, so nothing tells whether lines were cut off at the end"
            )
        return
    number, last_hash = head
    by_number = {entry["line"]: entry["hash"] for entry in verdict.entries}
    if unread and number < expected:
        verdict.notes.append(
            f"{unread[0]}: torn by a crash, the last line; its message did not leave"
        )
    elif unread:
        verdict.faults += [
            f"{place}: changed or cut off, its hash is wrong" for place in unread
        ]
    elif number >= expected:
        gone = (
            f"line {expected} is" if number == expected else f"lines {expected} to {number} are"
        )
        verdict.faults.append(f"head.json: {gone} missing at the end")
    elif by_number.get(number, last_hash) != last_hash:
        verdict.faults.append(f"head.json: line {number} is another one than was written")
