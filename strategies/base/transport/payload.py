"""The content of messages between server and silo: named vectors and a few numbers, with a manifest.

A message is a Flower ``RecordDict``: one ``ArrayRecord`` per vector and one ``ConfigRecord``. The ``ConfigRecord``
holds the manifest (each model's silo, round and number of training samples) and the method's numbers. Flower's object
store is content-addressed, so a model that goes to eleven silos is stored and uploaded once.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from partitions.common.errors import DataError
from strategies.base.transport.codecs import OF_CHANGES, Encoded, narrow, read, widen

MODEL_OF = "model."
GLOBAL, BUFFERS = "global", "buffers"  # names of models: the server's, and BatchNorm statistics
LONGEST_NAME = 200  # characters of a model's name in a message

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
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max  # an int may be too large for a float


class TensorArray(Array):
    """A Flower ``Array`` that holds a tensor and serialises it only when the bytes are read.

    In one process nothing is copied, and on a GPU nothing leaves the device. Over gRPC and under Ray it is an ordinary
    array. The caller must not write to a packed tensor afterwards.
    """

    tensor: Tensor

    def __init__(self, tensor: Tensor) -> None:
        self.__dict__.update(tensor=tensor.detach(), shape=tuple(tensor.shape), stype="numpy.ndarray")
        self.__dict__["dtype"] = str(tensor.dtype).removeprefix("torch.")

    def _array(self) -> Array:
        if "serialised" not in self.__dict__:
            self.__dict__["serialised"] = Array(self.tensor.cpu().numpy())
        return cast(Array, self.__dict__["serialised"])

    @property
    def data(self) -> bytes:  # type: ignore[override]
        return self._array().data

    @property
    def children(self) -> dict[str, Any]:
        return self._array().children

    def deflate(self) -> bytes:
        return self._array().deflate()  # under the type name that the other side expects: Array

    def numpy(self) -> Any:
        return self.tensor.cpu().numpy()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Array) and self._array() == other

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return Array, (self.dtype, self.shape, self.stype, self.data)


def array_record(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Return the tensors as a Flower record, uncopied: set singly, because ``ArrayRecord(dict)`` serialises arrays."""
    record = ArrayRecord()
    for name, tensor in tensors.items():
        record[name] = TensorArray(tensor)
    return record


def tensor_of(array: Array) -> Tensor:
    """Return the array as a tensor, without a copy if it is a :class:`TensorArray`."""
    if isinstance(array, TensorArray):
        return array.tensor
    return torch.from_numpy(np.ascontiguousarray(array.numpy()))


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
            self.packed[key] = (vector, record)  # the reference to the vector prevents reuse of its address
        return self.packed[key][1]

    def arrives(self, vector: Tensor) -> Tensor:
        """Return the vector as the other side receives it, bit for bit."""
        return widen(tensor_of(self.pack(vector)["vector"]), self.dtype)


def unpack(record: ArrayRecord, entry: Mapping[str, Any], base: Callable[[str], Tensor | None]) -> Model:
    """Return the model of a record and its manifest entry; raise DataError if they are invalid."""
    dtype = entry.get("dtype", "float32")
    try:
        tensors = {name: tensor_of(array) for name, array in record.items()}
    except Exception as error:
        raise DataError(f"its bytes are no array of {dtype:.80} ({type(error).__name__})") from error
    encoded = Encoded(tensors, dtype, entry.get("form", ""))
    vector = read(encoded, base(entry["name"]) if encoded.form else None)
    return Model(vector, entry["silo"], entry["round"], entry["samples"], encoded.bytes)


def wire_bytes(records: RecordDict) -> int:
    """Return the bytes of the arrays in a message, as the papers count communication."""
    arrays = [a for record in records.values() if isinstance(record, ArrayRecord) for a in record.values()]
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
        entry = {"name": name, "silo": model.silo, "round": model.round, "samples": model.samples, "dtype": wire.dtype}
        if name in encoded:
            entry |= {"dtype": encoded[name].dtype, "form": encoded[name].form}
            records[f"model.{name}"] = array_record(encoded[name].tensors)
        else:
            records[f"model.{name}"] = wire.pack(model.vector)
        manifest.append(entry)
    records["config"] = ConfigRecord(
        {"manifest": json.dumps(manifest), **{f"number.{k}": v for k, v in payload.numbers.items()}, **(config or {})}
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
    found = records.get("config")
    if not isinstance(found, ConfigRecord) or "manifest" not in found:
        raise DataError("the message has no config with a manifest")
    config = cast(dict[str, Number], dict(found))
    try:
        manifest = json.loads(cast(str, config.pop("manifest")))
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"the message's manifest is no JSON ({type(error).__name__})") from error
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
        models[entry["name"]] = model if device is None else replace(model, vector=model.vector.to(device))
    numbers = {k.removeprefix("number."): config.pop(k) for k in list(config) if k.startswith("number.")}
    return Payload(models, numbers), config


def is_entry(entry: object) -> bool:
    """Return whether a manifest entry is valid: a model's name, silo, round and number of samples."""
    kinds = {"name": str, "silo": str, "round": int, "samples": int}
    if not isinstance(entry, dict) or not all(isinstance(entry.get(key, ""), str) for key in ("dtype", "form")):
        return False
    right = all(isinstance(entry.get(key), kind) for key, kind in kinds.items())
    return right and entry["name"].isprintable() and len(entry["name"]) <= LONGEST_NAME


def stack(models: Iterable[Model]) -> Tensor:
    """Return the (silos x parameters) matrix of several models."""
    return torch.stack([m.vector for m in models])


def model_of(silo: str) -> str:
    """Return the key of a silo's model in messages and server state; the prefix avoids clashes with methods' keys."""
    return f"{MODEL_OF}{silo}"
