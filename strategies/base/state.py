"""State as a small record of arrays and numbers: the same record is stored, checkpointed and compared by tests.

Its files are safetensors whose header begins with a seal: the SHA-256 of the file with zeros in the seal's place. A
damaged file is rejected before anything is read from it. Any safetensors reader can read these files. Equal arrays of a
state are in its file once, and ``same`` in the header has the other names: a silo's best model is often its last.

Typed fields of a method's state, for both sides, stored by the one codec of ``state.py``.

A method declares its state as one class per side::

    class AppleClientState(ClientState):
        dr = Array()  # p_i (N,); None before the silo's first round
        cores = Arrays("core.")  # w_j^c (Σ,), by the silo's name
        dr_rounds = Item[list[int]](list)

``state.dr`` reads and writes the entry ``dr`` of the file, ``state.cores["a"]`` the entry ``core.a``. Names of fields
may change; keys in files do not. Replace an array, never write into it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import safetensors
import torch
from torch import Tensor

from models.flat import FlatModel
from partitions.common.errors import DataError
from partitions.common.files import write_atomically

BLANK = b"0" * 64  # in the seal's place while it is computed
BEFORE_SEAL = b'{"__metadata__":{"sha256":"'  # the start of a sealed file's header, after the 8 bytes of its length
MODEL_OF = "model."  # prefix of the names of silos' models
SAME = "same"  # in the header: {name: name of the equal array}
GLOBAL, BUFFERS = "global", "buffers"  # names of models: the server's, and BatchNorm statistics
# In the order in which safetensors writes them
DTYPES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
# A silo's own model, where one maps it from its file, has the alignment of torch's memory: sums give the same bits
FIRST, ALIGNED = "personal", 64
PIECE = 1 << 20  # bytes that are read at a time


@dataclass
class State:
    """Arrays and numbers by name, of a silo (stored in the silo) or of the server."""

    arrays: dict[str, Tensor] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)  # any JSON values

    def save(self, path: Path, keep: Path | None = None) -> None:
        """Write atomically, as sealed safetensors with the numbers in the header; ``keep`` gets the previous file."""
        arrays, same = without_copies(self.arrays)
        texts = {
            "numbers": json.dumps(self.numbers),
            **({SAME: json.dumps(same)} if same else {}),
        }
        write_sealed(path, arrays, texts, keep)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a state; raise DataError, which names the file, if it is unreadable or damaged."""
        try:
            arrays, texts = read_sealed(path)
            numbers, same = (json.loads(texts.get(name, "{}")) for name in ("numbers", SAME))
            if not isinstance(numbers, dict):
                raise DataError("its numbers have no names")
            return cls(arrays | {name: arrays[held] for name, held in same.items()}, numbers)
        except (
            OSError,
            ValueError,
            LookupError,
            AttributeError,
            TypeError,
            RecursionError,
        ) as error:
            raise DataError(f"the state file {path} cannot be read: {error}") from error

    def copy(self) -> Self:
        return type(self)(dict(self.arrays), json.loads(json.dumps(self.numbers)))


def without_copies(arrays: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the arrays without those that equal another one bit for bit, and the other's name for each of these."""
    kept, same, alike = dict[str, Tensor](), dict[str, str](), defaultdict[Any, list[str]](list)
    for name in sorted(arrays, key=lambda name: (name != FIRST, name)):
        array, data = arrays[name], bytes_of(arrays[name])
        ends = torch.cat((data[:ALIGNED], data[-ALIGNED:])).tolist()  # in which most differ
        others = alike[array.dtype, array.shape, array.device, *ends]
        for other in others:
            if torch.equal(data, bytes_of(arrays[other])):
                same[name] = other
                break
        else:
            others.append(name)
            kept[name] = array
    return kept, same


def bytes_of(array: Tensor) -> Tensor:
    return array.detach().contiguous().flatten().view(torch.uint8)


def map_arrays(path: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Return arrays of a state as maps of its file, without a check of it."""
    with safetensors.safe_open(path, framework="pt") as file:
        same = json.loads(file.metadata().get(SAME, "{}"))
        return {name: file.get_tensor(same.get(name, name)) for name in names}


# Of a model's arrays: its vector, its running statistics, its counts
SUFFIXES = ("", ".buffers", ".integers")

Parts = tuple[Tensor | None, Tensor | None, Tensor | None]


def model_in(arrays: Mapping[str, Tensor], name: str) -> Parts:
    """Return vector, buffers and integers of the model of this name, as ``FlatModel.load`` takes them."""
    vector, buffers, integers = (arrays.get(f"{name}{suffix}") for suffix in SUFFIXES)
    return vector, buffers, integers


def put_model(arrays: dict[str, Tensor], name: str, parts: Parts) -> None:
    """Set the arrays of a model; a part that is None, or of no numbers, is removed."""
    for suffix, part in zip(SUFFIXES, parts, strict=True):
        if part is None or not part.numel():
            arrays.pop(f"{name}{suffix}", None)
        else:
            arrays[f"{name}{suffix}"] = part


# ---- Sealed files --------------------------------------------------------------------------------------------------


def write_sealed(
    path: Path,
    tensors: Mapping[str, Tensor],
    texts: Mapping[str, str],
    keep: Path | None = None,
) -> None:
    """Write tensors, and texts into the header, atomically; ``keep`` gets the previous file."""
    names = sorted(
        tensors, key=lambda name: (name != FIRST, [*DTYPES].index(tensors[name].dtype), name)
    )
    content: dict[str, Any] = {"__metadata__": {"sha256": BLANK.decode(), **texts}}
    end = 0
    for name in names:
        tensor, start = tensors[name], end
        end += tensor.numel() * tensor.element_size()
        content[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": [*tensor.shape],
            "data_offsets": [start, end],
        }
    header = json.dumps(content, separators=(",", ":")).encode()
    header += b" " * (-(8 + len(header)) % ALIGNED)
    begin = len(header).to_bytes(8, "little") + header

    def write(temporary: Path) -> None:
        digest = hashlib.sha256(begin)
        with temporary.open("wb") as file:
            file.write(begin)
            # One after the other: a copy of all would double a silo's memory
            for name in names:
                data = bytes_of(tensors[name].cpu()).numpy().data
                digest.update(data)
                file.write(data)
            file.seek(begin.index(BLANK))
            file.write(digest.hexdigest().encode())

    write_atomically(path, write, keep=keep)


def read_sealed(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return tensors and texts of a sealed file. Raises OSError, or ValueError if the file is damaged."""
    _check_seal(path)
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            # Copies: a view into the file has another alignment than memory, and sums then differ in the last bits.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            return tensors, file.metadata()
    except safetensors.SafetensorError as error:
        raise DataError(str(error)) from error


def _check_seal(path: Path) -> None:
    """Raise DataError if the file has no seal, or another one than its content."""
    with path.open("rb") as file:
        start = file.read(8 + len(BEFORE_SEAL))
        if not start.endswith(BEFORE_SEAL):
            raise DataError("it is damaged: its header is not as it was written")
        seal = file.read(len(BLANK))
        digest = hashlib.sha256(start + BLANK)
        while piece := file.read(PIECE):
            digest.update(piece)
    if seal != digest.hexdigest().encode():
        raise DataError("it is damaged: its SHA-256 is not the one that was written")


T = TypeVar("T")


class Field:
    """One entry of a state; its key in the file is the field's name unless another one is given."""

    def __init__(self, key: str = "") -> None:
        self.key = key

    def __set_name__(self, owner: type[State], name: str) -> None:
        self.key = self.key or name


class Array(Field):
    """An array, or None if the state has none; setting None removes it."""

    def __get__(self, state: State, owner: type[State]) -> Tensor | None:
        return state.arrays.get(self.key)

    def __set__(self, state: State, value: Tensor | None) -> None:
        put(state.arrays, self.key, value)


class RequiredArray(Field):
    """An array that ``start_state`` sets; reading it earlier raises KeyError."""

    def __get__(self, state: State, owner: type[State]) -> Tensor:
        return state.arrays[self.key]

    def __set__(self, state: State, value: Tensor) -> None:
        state.arrays[self.key] = value


class Item(Field, Generic[T]):
    """Any JSON value; ``default()`` if the state has none. Setting None removes it."""

    def __init__(self, default: Callable[[], T], key: str = "") -> None:
        super().__init__(key)
        self.default = default

    def __get__(self, state: State, owner: type[State]) -> T:
        value: T = state.numbers[self.key] if self.key in state.numbers else self.default()
        return value

    def __set__(self, state: State, value: T) -> None:
        put(state.numbers, self.key, value)


class Arrays(Field):
    """The arrays whose keys begin with ``prefix``, by the rest of their keys."""

    def __get__(self, state: State, owner: type[State]) -> Entries[Tensor]:
        return Entries(state.arrays, self.key)


class Items(Field, Generic[T]):
    """The numbers whose keys begin with ``prefix``, by the rest of their keys."""

    def __get__(self, state: State, owner: type[State]) -> Entries[T]:
        return Entries(state.numbers, self.key)


class Entries(MutableMapping[str, T]):
    """A view of the entries whose keys begin with ``prefix``."""

    def __init__(self, entries: dict[str, T], prefix: str) -> None:
        self.entries, self.prefix = entries, prefix

    def __getitem__(self, name: str) -> T:
        return self.entries[f"{self.prefix}{name}"]

    def __setitem__(self, name: str, value: T) -> None:
        self.entries[f"{self.prefix}{name}"] = value

    def __delitem__(self, name: str) -> None:
        del self.entries[f"{self.prefix}{name}"]

    def __iter__(self) -> Iterator[str]:
        return iter(
            [
                key.removeprefix(self.prefix)
                for key in self.entries
                if key.startswith(self.prefix)
            ]
        )

    def __len__(self) -> int:
        return sum(key.startswith(self.prefix) for key in self.entries)


def put(entries: dict[str, Any], key: str, value: Any) -> None:
    """Set an entry; None removes it."""
    if value is None:
        entries.pop(key, None)
    else:
        entries[key] = value


class ClientState(State):
    """The state of every silo; the base class of a method's own."""

    personal = Array()  # the personal model (Σ,) of the last round that the silo took part in
    personal_buffers = Array("personal.buffers")  # its running statistics
    best = Array()  # the personal model with the best validation score

    def is_previous(self, model: FlatModel) -> bool:
        """Return whether this model, with its running statistics, equals the personal one."""
        vector, *kept = model_in(self.arrays, "personal")
        if vector is None or not torch.equal(model.vector, vector):
            return False
        held = zip((model.buffers, model.integers), kept, strict=True)
        return all(last is None or torch.equal(part, last) for part, last in held)

    def keep_model(self, parts: Parts, server_round: int, score: float | None) -> None:
        """Store the last personal model, and the best one by validation score (without validation data: the last)."""
        arrays, numbers = self.arrays, self.numbers
        if "best_accuracy" in numbers:  # a state of 0.1
            numbers["best_score"] = numbers.pop("best_accuracy")
        score = None if score is None or math.isnan(score) else score
        put_model(arrays, "personal", parts)
        # A model without a score does not replace a best one that exists.
        if "best_score" not in numbers or (score is not None and score > numbers["best_score"]):
            put_model(arrays, "best", parts)
            numbers["best_round"] = server_round
            if score is not None:
                numbers["best_score"] = score


class ServerState(State):
    """The server state of most methods; the base class of a method's own."""

    model = RequiredArray(GLOBAL)  # the shared model, or the shared part of one
    buffers = Array(BUFFERS)  # its running statistics
    models = Arrays(MODEL_OF)  # each silo's last model (Σ,), by the silo's name
    counted = Item[dict[str, int]](dict)  # silo -> the last round whose reply is in the state
    sums = Item[list[str]](list)  # the masked sums in the state, each with its silos
