"""The content of messages between server and silo: named vectors and a few numbers, with a manifest.

A message is a Flower ``RecordDict``: one ``ArrayRecord`` per vector and one ``ConfigRecord``. The ``ConfigRecord``
holds the manifest (each model's silo, round and number of training samples) and the method's numbers. Flower's object
store is content-addressed, so a model that goes to eleven silos is stored and uploaded once.

Silos' replies, read and checked: an invalid one raises DataError with one line, and the others go on.
"""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from logging import ERROR
from typing import Any, cast

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.common import log
from torch import Tensor

from models.flat import is_finite, scatter
from models.layout import Layout
from partitions.common.errors import DataError
from strategies.base.state import BUFFERS, MODEL_OF
from strategies.base.transport.codecs import OF_CHANGES, Encoded, narrow, read, widen
from strategies.base.transport.reporting import read_metrics, reason_of

LONGEST_NAME = 200  # characters of a model's name in a message
LONGEST_HEADER = 1 << 16  # bytes before an array's values
JOINED = (5 << 20) - 1024  # bytes of an array that are sent in one part with its header

Number = bool | int | float | str | list[int] | list[float] | list[str]


@dataclass(frozen=True)
class Model:
    """A named vector: usually a model of shape (Σ,), or the part of one that a method shares.

    ``silo`` is its owner (empty: the server), ``round`` the round it was made in, ``samples`` its number of training
    samples, ``bytes`` its size on the wire if it was received.
    """

    vector: Tensor
    silo: str = ""
    round: int = 0
    samples: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class Payload:
    """The content of one message to or from a silo: models by name, and numbers by name."""

    models: Mapping[str, Model] = field(default_factory=dict)
    numbers: Mapping[str, Number] = field(default_factory=dict)


def is_number(value: object) -> bool:
    """Return whether a value that a silo sent is a finite number."""
    # An int may be too large for a float
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


class TensorArray(Array):
    """A Flower ``Array`` that holds a tensor and serialises it only when the bytes are read.

    In one process nothing is copied, and on a GPU nothing leaves the device. Over gRPC and under Ray it is an ordinary
    array. The caller must not write to a packed tensor afterwards.
    """

    # Which the other side expects as the type
    __qualname__ = Array.__qualname__
    tensor: Tensor

    def __init__(self, tensor: Tensor) -> None:
        self.__dict__.update(
            tensor=tensor.detach(), shape=tuple(tensor.shape), stype="numpy.ndarray"
        )
        self.__dict__["dtype"] = str(tensor.dtype).removeprefix("torch.")

    @property
    def pieces(self) -> list[memoryview]:
        """Return the bytes that numpy.save writes: the header, and the tensor's own memory."""
        array, header = self.tensor.cpu().contiguous().numpy(), io.BytesIO()
        kind = np.lib.format.header_data_from_array_1_0(array)
        np.lib.format.write_array_header_1_0(header, kind)
        return [header.getbuffer(), array.reshape(-1).view(np.uint8).data]

    def slice_array(self) -> Any:
        """Return Flower's chunks of these bytes: views of the tensor, but for the first ones."""
        if "_chunks" not in self.__dict__:
            header, values = self.pieces
            chunks, array = [], Array("", (), "", b"")
            for data in (bytes(header) + values[:JOINED], values[JOINED:]):
                array.__dict__ = {"data": data}
                chunks += array.slice_array()
            self.__dict__["_chunks"] = chunks
        return self.__dict__["_chunks"]

    @property
    def data(self) -> bytes:  # type: ignore[override]
        return b"".join(self.pieces)

    def __reduce__(self) -> tuple[Any, ...]:
        return Array, (self.dtype, self.shape, self.stype, self.data)


def array_record(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Return the tensors as a Flower record, uncopied: set singly, because ``ArrayRecord(dict)`` serialises arrays."""
    record = ArrayRecord()
    for name, tensor in tensors.items():
        record[name] = TensorArray(tensor)
    return record


def tensor_of(array: Array) -> Tensor:
    """Return the array as a tensor; without a copy if it is a :class:`TensorArray`, or if its bytes may be changed."""
    if isinstance(array, TensorArray):
        return array.tensor
    data = memoryview(array.data)
    data = memoryview(bytearray(data)) if data.readonly else data
    start = io.BytesIO(data[:LONGEST_HEADER])
    np.lib.format.read_magic(start)
    shape, by_columns, kind = np.lib.format.read_array_header_1_0(start)
    values = np.frombuffer(data, kind, math.prod(shape), start.tell())
    return torch.from_numpy(values.reshape(shape, order="F" if by_columns else "C"))


class Wire:
    """The format of whole vectors: float32, or at half the bytes float16 or bfloat16; they arrive as float32.

    If changes have another format (``codecs.py``), whole vectors travel as float32. A vector in several messages is
    packed once: one record, serialised and hashed once.
    """

    def __init__(self, dtype: str = "float32") -> None:
        self.dtype = "float32" if dtype in OF_CHANGES else dtype
        self.packed: dict[tuple[int, int], tuple[Tensor, ArrayRecord]] = {}

    def pack(self, vector: Tensor) -> ArrayRecord:
        key = vector.data_ptr(), vector.numel()
        if key not in self.packed:
            record = array_record({"vector": narrow(vector, self.dtype)})
            # The reference to the vector prevents reuse of its address
            self.packed[key] = (vector, record)
        return self.packed[key][1]

    def arrives(self, vector: Tensor) -> Tensor:
        """Return the vector as the other side receives it, bit for bit."""
        return widen(tensor_of(self.pack(vector)["vector"]), self.dtype)


def unpack(
    record: ArrayRecord, entry: Mapping[str, Any], base: Callable[[str], Tensor | None]
) -> Model:
    """Return the model of a record and its manifest entry; raise DataError if they are invalid."""
    dtype = entry.get("dtype", "float32")
    try:
        tensors = {name: tensor_of(array) for name, array in record.items()}
    except Exception as error:
        raise DataError(
            f"its bytes are no array of {dtype:.80} ({type(error).__name__})"
        ) from error
    encoded = Encoded(tensors, dtype, entry.get("form", ""))
    vector = read(encoded, base(entry["name"]) if encoded.form else None)
    return Model(vector, entry["silo"], entry["round"], entry["samples"], encoded.bytes)


def wire_bytes(records: RecordDict) -> int:
    """Return the bytes of the arrays in a message, as the papers count communication."""
    tables = [record for record in records.values() if isinstance(record, ArrayRecord)]
    arrays = [array for record in tables for array in record.values()]
    return sum(math.prod(array.shape) * np.dtype(array.dtype).itemsize for array in arrays)


def encode(
    payload: Payload,
    config: Mapping[str, Number] | None = None,
    wire: Wire | None = None,
    encoded: Mapping[str, Encoded] | None = None,
) -> RecordDict:
    """Return a payload as the content of a message, with ``config``. ``encoded``: models in encoded form."""
    wire, encoded, manifest = wire or Wire(), encoded or {}, []
    records = RecordDict()
    for name, model in payload.models.items():
        entry = {
            "name": name,
            "silo": model.silo,
            "round": model.round,
            "samples": model.samples,
            "dtype": wire.dtype,
        }
        if name in encoded:
            entry |= {"dtype": encoded[name].dtype, "form": encoded[name].form}
            records[f"model.{name}"] = array_record(encoded[name].tensors)
        else:
            records[f"model.{name}"] = wire.pack(model.vector)
        manifest.append(entry)
    records["config"] = ConfigRecord(
        {
            "manifest": json.dumps(manifest),
            **{f"number.{k}": v for k, v in payload.numbers.items()},
            **(config or {}),
        }
    )
    return records


def decode(
    records: RecordDict,
    device: torch.device | str | None = None,
    base: Callable[[str], Tensor | None] = lambda name: None,
) -> tuple[Payload, dict[str, Number]]:
    """Return the payload and the config of a message; raise DataError if manifest and records disagree.

    ``base`` returns the base of a model that does not travel whole, by its name.
    """
    stated = records.get("config")
    if not isinstance(stated, ConfigRecord) or "manifest" not in stated:
        raise DataError("the message has no config with a manifest")
    config = cast(dict[str, Number], dict(stated))
    try:
        manifest = json.loads(cast(str, config.pop("manifest")))
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(
            f"the message's manifest is no JSON ({type(error).__name__})"
        ) from error
    if not isinstance(manifest, list) or not all(map(is_entry, manifest)):
        raise DataError("the message's manifest does not list models")
    models = {}
    for entry in manifest:
        record = records.get(f"model.{entry['name']}")
        if not isinstance(record, ArrayRecord) or not (entry.get("form") or "vector" in record):
            raise DataError(f"the message names model '{entry['name']}' and does not carry it")
        try:
            model = unpack(record, entry, base)
        except ValueError as error:
            raise DataError(f"model '{entry['name']}': {error}") from error
        models[entry["name"]] = (
            model if device is None else replace(model, vector=model.vector.to(device))
        )
    numbers = {
        k.removeprefix("number."): config.pop(k)
        for k in list(config)
        if k.startswith("number.")
    }
    return Payload(models, numbers), config


def is_entry(entry: object) -> bool:
    """Return whether a manifest entry is valid: a model's name, silo, round and number of samples."""
    kinds = {"name": str, "silo": str, "round": int, "samples": int, "dtype": str, "form": str}
    if not isinstance(entry, dict):
        return False
    entry = {"dtype": "", "form": "", **entry}
    right = all(isinstance(entry.get(key), kind) for key, kind in kinds.items())
    return right and entry["name"].isprintable() and len(entry["name"]) <= LONGEST_NAME


def model_of(silo: str) -> str:
    """Return the key of a silo's model in messages and server state; the prefix avoids clashes with methods' keys."""
    return f"{MODEL_OF}{silo}"


@dataclass(frozen=True)
class Update:
    """A silo's reply: the vectors named in its client's ``uploads``, and the method's numbers."""

    silo: str
    samples: int
    vectors: Mapping[str, Tensor]
    numbers: Mapping[str, Number]
    metrics: Mapping[str, float]
    bytes: int = 0  # of its vectors, on the wire
    silos: tuple[str, ...] = ()  # the silos whose mean it is, if it is one of several

    @property
    def vector(self) -> Tensor:
        """The first, and usually the only, vector."""
        return next(iter(self.vectors.values()))


def silos_of(updates: Iterable[Update]) -> list[str]:
    """Return the silos that the updates are of."""
    return [silo for update in updates for silo in update.silos or (update.silo,)]


@dataclass(frozen=True)
class ExpectedReply:
    """The requirements on a reply of this round: method, round, and the names and lengths of its vectors."""

    method: str
    round: int
    # Each silo's weight in a mean; the reply's own number is not used
    samples: Mapping[str, int]
    names: tuple[str, ...]
    size: Callable[[str, str], int]  # (vector, silo) -> length
    numbers: tuple[str, ...]  # the method's numbers that are read
    # (vector, silo) -> base of an encoded one
    base: Callable[[str, str], Tensor | None] = lambda name, silo: None


def read_reply(
    reply: Message, silo: str, base: Callable[[str], Tensor | None] = lambda name: None
) -> tuple[Payload, dict[str, Number]]:
    """Return a silo's reply as payload and config; raise DataError, with the silo's reason, if it is unusable.

    ``base`` returns the base of a vector that does not travel whole, by its name.
    """
    if reply.has_error():
        raise DataError(reason_of(reply.error.reason))
    try:
        return decode(reply.content, base=base)
    except DataError:
        raise
    except Exception as error:  # the bytes are a silo's: invalid ones must not stop the others
        log(ERROR, "a reply of %s cannot be read", silo, exc_info=error)
        raise DataError(
            f"the reply cannot be read ({type(error).__name__}: {error})"
        ) from error


def read_update(reply: Message, silo: str, expected: ExpectedReply) -> Update:
    """Return a silo's train reply as an Update; raise DataError if it does not meet ``expected``."""
    payload, config = read_reply(
        reply, silo, lambda name: expected.base(name, silo) if name in expected.names else None
    )
    named, number = config.get("silo"), config.get("round")
    if number != expected.round or named != silo or silo not in expected.samples:
        raise DataError(
            f"a reply of {named!r:.80} for round {number!r:.80}, not of {silo} for {expected.round}"
        )
    metrics = read_metrics(reply.content.get("metrics"))
    wanted, sent = {*expected.names}, {*payload.models}
    if missing := wanted - sent:
        raise DataError(f"the reply lacks {', '.join(sorted(missing))}")
    if unknown := sent - wanted:
        raise DataError(
            f"the reply holds {', '.join(sorted(unknown))}, which {expected.method} does not send"
        )
    vectors = {name: payload.models[name].vector for name in expected.names}
    for name, vector in vectors.items():
        check_vector(name, vector, expected.size(name, silo))
    numbers = {
        name: payload.numbers[name] for name in expected.numbers if name in payload.numbers
    }
    came = sum(payload.models[name].bytes for name in expected.names)
    return Update(silo, expected.samples[silo], vectors, numbers, metrics, came)


def check_vector(name: str, vector: Tensor, size: int) -> None:
    """Raise DataError if a vector is not float32 of this length, or not finite."""
    if vector.dtype != torch.float32 or vector.shape != (size,):
        raise DataError(
            f"'{name}' is {vector.dtype} of shape {tuple(vector.shape)}, not float32 of ({size},)"
        )
    if not is_finite(vector):
        raise DataError(f"'{name}' holds values that are not finite")


def check_statistics(vector: Tensor, layout: Layout, parts: Sequence[slice]) -> None:
    """Raise DataError if BatchNorm statistics of these parts contain a variance below 0."""
    whole = scatter(vector.new_zeros(layout.buffer_size), tuple(parts), vector)
    variances = [
        whole[e.start : e.stop] for e in layout.buffers if e.name.endswith("running_var")
    ]
    if any(bool((variance < 0).any()) for variance in variances):
        raise DataError(f"'{BUFFERS}' holds a variance below 0")
