"""Messages that take long on a slow line: progress lines every ten seconds. And the parts that a message travels in.

Flower moves a message in parts of 5 MiB, two at a time, each in a call without a time limit. A failed call is repeated,
so after a cut only the parts in transit are sent again. A receiver takes a message whose parts have begun to come, and
asks for a missing one again after 0.05, 0.1 to 1 s, as often as it takes: parts that cannot come any more are removed.
Small parts travel in the message's tree (:func:`enclose`).
"""

import hashlib
import math
import mmap
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from ..protocol.ours import errors
from ..protocol.private import return_memory
from .internals import internal

LONG_SECONDS = 3.0  # after which a transfer counts as long
EVERY_SECONDS = 10.0  # between two lines
# The first and the longest pause before a part that has not come is asked for again
AGAIN_SECONDS = (0.05, 1.0)
LAST_PARTS = 4  # come last and are tiny: the descriptions of a message, its content, a record and an array
MOST_PARTS = 20_000  # of a reply; a model is one array, of 5 MiB a part
# Bytes of the part that describes an array, from which Flower's `inflate` makes sixteen times as many
MOST_DESCRIPTION = 1 << 22
MOST_ENCLOSED = 1 << 16  # bytes of a message's parts that travel in its tree
STALLED_SECONDS = 20.0  # without a part, until the line reports it
Echo = Callable[[str], object]


class LostPartError(Exception):
    """A part of a message is not there any more."""


@dataclass(eq=False)
class Transfer:
    """Transfer of one message, as a context; ``add`` may be called by several threads.

    ``parts`` and ``size`` (bytes) are the expected ones, 0 if unknown. ``lasting`` is called with True when the
    transfer has become a long one, and with False when that is over.
    """

    what: str
    echo: Echo
    parts: int = 0
    size: int = 0
    lasting: Callable[[bool], object] = lambda yes: None

    def __post_init__(self) -> None:
        self.done = self.bytes = 0
        self.lock = threading.Lock()
        self.over = threading.Event()
        self.began = self.moved = time.monotonic()
        self.thread = threading.Thread(target=self._tell, daemon=True)

    def __enter__(self) -> "Transfer":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()

    def expect(self, parts: int, size: int) -> None:
        self.parts = self.done + parts
        self.size = self.bytes + size

    def add(self, content: bytes) -> bytes:
        """Count a whole part that has arrived, and return it."""
        with self.lock:
            self.done += 1
            self.bytes += len(content)
            self.moved = time.monotonic()
        return content

    def _tell(self) -> None:
        if self.over.wait(LONG_SECONDS):
            return
        self.lasting(True)
        reported, wait = False, EVERY_SECONDS - LONG_SECONDS
        while not self.over.wait(wait):
            self.echo(f"{self.what}: {self.line()}")
            reported, wait = True, EVERY_SECONDS
        self.lasting(False)
        if reported:
            seconds = self.moved - self.began
            self.echo(
                f"{self.what}: {self.bytes / 1e6:.0f} MB, {self.done} parts, in {seconds:.0f} s"
            )

    def line(self) -> str:
        """Return "62 of 200 MB, 2.4 MB/s, 58 s left". An unknown size is estimated from the parts received."""
        now = time.monotonic()
        about = "" if self.size or not self.done else "about "
        size = self.size or (
            self.bytes / self.done * max(self.parts - LAST_PARTS, self.done) if self.done else 0
        )
        rate = self.bytes / max(now - self.began, 1e-3)
        text = (
            f"{self.bytes / 1e6:.0f} of {about}{size / 1e6:.0f} MB" if size else "nothing yet"
        )
        if now - self.moved >= STALLED_SECONDS:
            return f"{text}, no part for {now - self.moved:.0f} s"
        if not rate:
            return text
        left = max(size - self.bytes, 0) / rate
        return f"{text}, {rate / 1e6:.1f} MB/s, {left:.0f} s left"


def echo(line: str) -> None:
    print(line, flush=True)


def keep_pieces() -> None:
    """Have the arrays of received messages keep the chunks that they came in, and join them when they are read.

    Flower copies all bytes four times. Its own `inflate` works here on names in place of them.
    """
    from flwr.app import Array, ArrayRecord

    class ChunkedArray(Array):
        __qualname__ = Array.__qualname__

        @classmethod
        def inflate(cls, object_content: bytes, children: Any = None) -> Any:
            if len(object_content) > MOST_DESCRIPTION:
                raise errors.DataError("an array's description is too long")
            names = {name: SimpleNamespace(data=bytes.fromhex(name)) for name in children or {}}
            array = super().inflate(object_content, names)  # type: ignore[arg-type]
            data = array.data
            array.__dict__["pieces"] = [
                children[data[at : at + 32].hex()].data for at in range(0, len(data), 32)
            ]
            return array

        @property
        def data(self) -> Any:
            pieces = self.__dict__["pieces"]
            if len(pieces) != 1:
                pieces[:] = [join_pieces(pieces)]
            return pieces[0]

        @data.setter
        def data(self, content: bytes) -> None:
            self.__dict__["pieces"] = [content]

    class ChunkedRecord(ArrayRecord):
        __qualname__ = ArrayRecord.__qualname__

        @classmethod
        def inflate(cls, object_content: bytes, children: Any = None) -> Any:
            names = {name: Array("", (), name, b"") for name in children or {}}
            record = super().inflate(object_content, names)  # type: ignore[arg-type]
            for key, named in record.items():
                record[key] = children[named.stype]
            return record

    utils = internal("inflatable_utils")
    utils.inflatable_class_registry.update(Array=ChunkedArray, ArrayRecord=ChunkedRecord)
    copy_once(utils.ArrayChunk, utils.HEAD_VALUE_DIVIDER, utils.HEAD_BODY_DIVIDER)


def receive_parts(
    tree: Any,
    ask: Callable[[str], Any],
    movers: Executor,
    what: str,
    report: Echo,
    lasting: Callable[[bool], object] = lambda yes: None,
    until: float = math.inf,
) -> dict[str, bytes]:
    """Return the parts of a message by their names: those in its tree, and the answers of ``ask`` to the other names.

    The names are the server's: none is hashed. Raises LostPartError, also for a part that is missing at ``until``.
    """
    names, parts = dict.fromkeys(object_ids(tree)), parts_in(tree)
    if missing := [name for name in names if name not in parts]:
        with Transfer(what, report, len(names), lasting=lasting) as transfer:
            for part in parts.values():
                transfer.add(part)

            def pull(name: str) -> None:
                pause, most = AGAIN_SECONDS
                while not (answer := ask(name)).object_available:
                    if not answer.object_found or transfer.over.wait(pause):
                        raise LostPartError(f"the server has no part {name} of it any more")
                    if time.monotonic() > until:
                        raise LostPartError("not all parts of it came in time")
                    pause = min(2 * pause, most)
                parts[name] = transfer.add(answer.object_content)

            list(movers.map(pull, missing))
        return_memory()
    return {name: parts[name] for name in names}


def copy_once(chunk: Any, between: str, behind: bytes) -> None:
    """Have Flower's chunks hashed once and without a copy, copied once to be sent, and not at all when received."""

    def head(self: Any) -> bytes:
        return f"{chunk.__qualname__}{between}{between}{len(self.data)}".encode() + behind

    def object_id(self: Any) -> str:
        if "_object_id" not in self.__dict__:
            sha256 = hashlib.sha256(head(self))
            sha256.update(self.data)
            self.__dict__["_object_id"] = sha256.hexdigest()
        return str(self.__dict__["_object_id"])

    def inflate(content: bytes, children: Any = None) -> Any:
        return chunk(memoryview(content).toreadonly()[content.find(behind) + len(behind) :])

    chunk.object_id, chunk.inflate = property(object_id), staticmethod(inflate)
    chunk.deflate = lambda self: b"".join((head(self), self.data))


def object_ids(tree: Any) -> list[str]:
    return [tree.object_id, *(name for child in tree.children for name in object_ids(child))]


def tree_fault(tree: Any, store: Any) -> str:
    """Return what is wrong with the tree of a reply; empty if nothing is.

    Flower's store keeps the children that a part had first, wherever it is named again. So a tree that says less there
    would be small when it comes, and any size when it is looked through.
    """
    children, waiting = dict[str, list[str]](), [tree]
    if len(names := object_ids(tree)) > MOST_PARTS:
        return f"its reply has {len(names)} parts; at most {MOST_PARTS}"
    while waiting:
        part = waiting.pop()
        try:
            known = object_ids(store.get_object_tree(part.object_id)) == object_ids(part)
        except internal("NoObjectInStoreError"):
            below = [child.object_id for child in part.children]
            known = children.setdefault(part.object_id, below) == below
            waiting += part.children
        if not known:
            return "its reply names a part with other parts in it than before"
    return ""


def enclose(tree: Any, get: Callable[[str], bytes | None]) -> None:
    """Put small parts of a message into its tree, each as a field that Flower's trees do not have.

    ``get`` returns the content of a part by its name. Flower ignores the field, and moves all parts as usual.
    """
    field, room = internal("message_pb2").PushObjectRequest, MOST_ENCLOSED
    for name in object_ids(tree):
        content = get(name)
        if content and len(content) <= room:
            room -= len(content)
            tree.MergeFromString(field(object_content=content).SerializeToString())


def held_bytes(array: Any) -> int:
    """Return the bytes of an array, whose pieces are not joined."""
    pieces = array.__dict__.get("pieces")
    return len(array.data) if pieces is None else sum(map(len, pieces))


def size_of(part: Any) -> int:
    """Return the bytes of a part that is a chunk of an array; of another part 0, for it is small."""
    return len(part.data) if type(part).__name__ == "ArrayChunk" else 0


def tree_of(message: Any, parts: Mapping[str, Any], most: int = MOST_ENCLOSED) -> Any:
    """Return the tree of a message with these parts, with those in it whose chunks have at most so many bytes."""

    def get(name: str) -> bytes | None:
        content: bytes | None = parts[name].deflate() if size_of(parts[name]) <= most else None
        return content

    tree = internal("inflatable_object").get_object_tree(message)
    enclose(tree, get)
    return tree


def parts_in(tree: Any) -> dict[str, bytes]:
    """Return the parts in a message's tree by their names, which are the sums of their content."""
    from google.protobuf.unknown_fields import UnknownFieldSet  # type: ignore[import-untyped]

    fields = (field.data for field in UnknownFieldSet(tree))
    parts = (data for data in fields if isinstance(data, bytes))
    return {hashlib.sha256(part).hexdigest(): part for part in parts}


def join_pieces(pieces: list[Any]) -> Any:
    """Return the pieces in one, a writable buffer; each is dropped once it is there."""
    size = sum(map(len, pieces))
    if not size:
        return b""
    whole = new_buffer(size)
    while pieces:
        whole.write(pieces.pop(0))
    return memoryview(whole)


def new_buffer(size: int) -> mmap.mmap:
    """Return memory that is the system's again as soon as it is not used, unlike an allocator's."""
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def is_whole(name: str, store: Any) -> bool:
    """Return whether all parts of a message have arrived."""
    try:
        tree = store.get_object_tree(name)
    except Exception:  # a part was removed again, with its push session
        return False
    return all(store.get(name) for name in object_ids(tree))
