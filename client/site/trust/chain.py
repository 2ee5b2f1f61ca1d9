"""A site's files of lines that are appended to only, every line chained to the one before by its hash.

    FOLDER/KIND-000001.jsonl  KIND-000002.jsonl ...    a line per entry, in JSON
    FOLDER/head.json                                   number and hash of the last line

A line is on the disk before :meth:`Chain.append` returns. Its `hash` is the SHA-256 of the line up to there, and
`previous` is the `hash` of the line before, so that a line that is changed, taken out or moved is found, and named, by
`verify`; and `head.json` tells of lines that were cut off at the end. A line that a crash has torn is left as it is.
The next one notes its SHA-256 as `torn`, and goes on from the last whole one.

The audit log (`audit.py`) is one, and the ledger of a privacy budget (`../budget/ledger.py`).

Standard library only: the process that runs the app loads this file (see `private.py`).
"""

import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

LARGEST = 2 << 20  # bytes, after which the next file is begun
BLOCK = 1 << 16  # bytes, as which a file is read from its end
START = "0" * 64  # what the first line follows
END = b',"hash":"'
EVERY = frozenset({"line", "previous", "time", "hash"})  # what every line of every chain tells, beside `torn`


class Chain:
    """The chain in one folder, for a process that writes to it."""

    kind: ClassVar[str]  # begins its files' names
    required: ClassVar[frozenset[str]]  # what every line tells

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep other processes from writing. Raises OSError where the folder cannot be written to."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def append(self, entry: Mapping[str, Any]) -> tuple[int, str]:
        """Write one line and wait until it is on the disk; return its number and hash.

        Raises OSError where it is not; then nothing may leave.
        """
        with self.held():
            return self.write(entry)

    def write(self, entry: Mapping[str, Any]) -> tuple[int, str]:
        """Write one line, as :meth:`append` does, in a process that holds the chain already."""
        number, before, torn = self._end()
        head = {"line": number + 1, "previous": before} | ({"torn": digest(torn)} if torn else {})
        file = self._file()
        entry, note = self.completed(entry, number + 1, file.name)
        text, own = chained({**head, **entry})
        self._write(text, file)
        write_whole(self.folder / "head.json", json.dumps({"line": number + 1, "hash": own, **note}) + "\n")
        return number + 1, own

    def completed(self, entry: Mapping[str, Any], number: int, file: str) -> tuple[Mapping[str, Any], dict[str, Any]]:
        """The entry as it is written, as this line of this file; and what `head.json` notes besides."""
        return entry, {}

    def verify(self, first: int = 1) -> "Verdict":
        """Read the chain and follow it from line `first`: earlier ones may be kept elsewhere."""
        return verify(self.folder, first, self.kind, self.required)

    def _end(self) -> tuple[int, str, bytes]:
        """Number and hash of the last line, and what stands behind it without being one."""
        torn: list[bytes] = []
        number, before = read_head(self.folder) or (0, START)
        files = files_of(self.folder, self.kind)[-2:]
        for text in (text for file in reversed(files) for text in last_first(file)):
            entry = parsed(text, self.required)
            if entry is not None:
                if entry["line"] >= number:  # else lines that were there are gone; `verify` will say so
                    number, before = entry["line"], entry["hash"]
                break
            torn.append(text)
        return number, before, b"\n".join(reversed(torn)).strip(b"\n")

    def _file(self) -> Path:
        """The file that the next line goes to."""
        files = files_of(self.folder, self.kind)
        last = files[-1] if files else self.folder / file_name(1, self.kind)
        if files and last.stat().st_size >= LARGEST:
            last = self.folder / file_name(number_of(last) + 1, self.kind)
        return last

    def _write(self, text: bytes, last: Path) -> None:
        new = not last.exists()
        descriptor = os.open(last, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            size = os.fstat(descriptor).st_size
            cut = size and os.pread(descriptor, 1, size - 1) != b"\n"
            data = (b"\n" if cut else b"") + text + b"\n"
            try:
                while data:
                    data = data[os.write(descriptor, data) :]
                os.fsync(descriptor)
            except OSError:
                os.ftruncate(descriptor, size)  # of a line that is not there whole nothing stays
                raise
        finally:
            os.close(descriptor)
        if new:
            sync_folder(self.folder)


def chained(entry: Mapping[str, Any]) -> tuple[bytes, str]:
    """The line of an entry, which ends with its own hash; and that hash."""
    body = json.dumps(entry, separators=(",", ":")).encode()[:-1]
    own = digest(body)
    return body + END + own.encode() + b'"}', own


def parsed(text: bytes, required: frozenset[str] = EVERY) -> dict[str, Any] | None:
    """The entry of a line whose hash is right; None for any other text."""
    body, _, own = text.rpartition(END)
    if own != digest(body).encode() + b'"}':
        return None
    try:
        entry: dict[str, Any] = json.loads(text)
    except ValueError:
        return None
    return entry if entry.keys() >= required and isinstance(entry["line"], int) else None


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def plain(values: Mapping[str, Any]) -> bytes:
    """Values as one text, the same for the same values."""
    return json.dumps(values, sort_keys=True, default=lambda value: value.hex()).encode()


# --- files ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """A line's text, and where it stands."""

    file: str
    number: int
    text: bytes

    def __str__(self) -> str:
        return f"{self.file}, line {self.number}"


def file_name(number: int, kind: str) -> str:
    return f"{kind}-{number:06d}.jsonl"


def number_of(file: Path) -> int:
    return int(file.stem.rpartition("-")[2])


def files_of(folder: Path, kind: str) -> list[Path]:
    """The chain's files, the oldest first."""
    return sorted(folder.glob(f"{kind}-[0-9]*.jsonl"), key=number_of)


def lines(files: Sequence[Path]) -> Iterator[Place]:
    """All lines of these files; of the last one also what has no end."""
    for file in files:
        parts = file.read_bytes().split(b"\n")
        for number, text in enumerate(parts if parts[-1] else parts[:-1], 1):
            yield Place(file.name, number, text)


def last_first(file: Path) -> Iterator[bytes]:
    """The lines of a file from its end, also what has none there; no more is read than is asked for."""
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
    """Number and hash of the last line that was written; None where there is no such note, or it is unreadable."""
    try:
        head = json.loads((folder / "head.json").read_text())
        return int(head["line"]), str(head["hash"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_whole(path: Path, text: str) -> None:
    """Whole or not at all, and on the disk. (`partitions.common.files` is not to be had here.)"""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Wait until a folder's list of names is on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- is it whole? -----------------------------------------------------------------------------------------


@dataclass
class Verdict:
    """Result of `verify`: the entries that can be read, what is wrong, and what is only worth knowing."""

    entries: list[dict[str, Any]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def verify(folder: Path, first: int, kind: str, required: frozenset[str]) -> Verdict:
    """Read a chain and follow it from line `first`: earlier ones may be kept elsewhere."""
    found = Verdict()
    expected, before, unread = first, START if first == 1 else "", list[Place]()
    for place in lines(files_of(folder, kind)):
        entry = parsed(place.text, required)
        if entry is None:
            unread.append(place)
            continue
        if changed := _check_unread(found, unread, entry.get("torn")):
            expected, before = expected + changed, ""  # what the next one follows is not known
        unread = []
        number = entry["line"]
        if number > expected:
            gone = f"line {expected} is" if number == expected + 1 else f"lines {expected} to {number - 1} are"
            found.faults.append(f"{place}: {gone} missing before line {number}")
        elif number < expected:
            found.faults.append(f"{place}: line {number} stands behind line {expected - 1}: moved, or written twice")
        elif before and entry["previous"] != before:
            found.faults.append(f"{place}: line {number} does not follow from the line before it: one was replaced")
        if number >= expected:
            expected, before = number + 1, entry["hash"]
        found.entries.append(entry)
    _check_end(found, folder, unread, expected)
    return found


def _check_unread(found: Verdict, unread: Sequence[Place], torn: str | None) -> int:
    """Text that is no entry: torn by a crash if the next line says so, else changed; how many lines these were."""
    if not unread:
        return 0
    if torn == digest(b"\n".join(place.text for place in unread).strip(b"\n")):
        found.notes.append(f"{unread[0]}: torn by a crash; its message did not leave, and the next line says so")
        return 0
    found.faults += [f"{place}: changed, its hash is wrong" for place in unread]
    return len(unread)


def _check_end(found: Verdict, folder: Path, unread: Sequence[Place], expected: int) -> None:
    """The last lines against the note of the last one."""
    head = read_head(folder)
    if head is None:
        if found.entries or unread:
            found.faults.append("head.json: missing or damaged, so nothing tells whether lines were cut off at the end")
        return
    number, own = head
    by_number = {entry["line"]: entry["hash"] for entry in found.entries}
    if unread and number < expected:
        found.notes.append(f"{unread[0]}: torn by a crash, the last line; its message did not leave")
    elif unread:
        found.faults += [f"{place}: changed or cut off, its hash is wrong" for place in unread]
    elif number >= expected:
        gone = f"line {expected} is" if number == expected else f"lines {expected} to {number} are"
        found.faults.append(f"head.json: {gone} missing at the end")
    elif by_number.get(number, own) != own:
        found.faults.append(f"head.json: line {number} is another one than was written")
