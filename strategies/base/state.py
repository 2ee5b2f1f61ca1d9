"""State as a small record of arrays and numbers: the same record is stored, checkpointed and compared by tests.

Its files are safetensors whose header begins with a seal: the SHA-256 of the file with zeros in the seal's place. A
damaged file is rejected before anything is read from it. Any safetensors reader can read these files.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from logging import WARNING
from pathlib import Path
from typing import Any, Self

import safetensors
import safetensors.torch
from flwr.common import log
from torch import Tensor

from partitions.common.errors import DataError
from partitions.common.files import write_atomically

BLANK = b"0" * 64  # in the seal's place while it is computed
BEFORE_SEAL = b'{"__metadata__":{"sha256":"'  # the start of a sealed file's header, after the 8 bytes of its length
PIECE = 1 << 20  # bytes that are read at a time


@dataclass
class State:
    """Arrays and numbers by name, of a silo (stored in the silo) or of the server."""

    arrays: dict[str, Tensor] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)  # any JSON values

    def save(self, path: Path, keep: Path | None = None) -> None:
        """Write atomically, as sealed safetensors with the numbers in the header; ``keep`` gets the previous file."""
        arrays = {name: tensor.detach().cpu().contiguous() for name, tensor in self.arrays.items()}
        write_sealed(path, _unshared(arrays), {"numbers": json.dumps(self.numbers)}, keep)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a state; raise DataError, which names the file, if it is unreadable or damaged."""
        try:
            arrays, texts = read_sealed(path, ("numbers",))
            numbers = json.loads(texts.get("numbers", "{}"))
            if not isinstance(numbers, dict):
                raise DataError("its numbers have no names")
            return cls(arrays, numbers)
        except (OSError, ValueError, RecursionError) as error:
            raise DataError(f"the state file {path} cannot be read: {error}") from error

    def copy(self) -> Self:
        return type(self)(dict(self.arrays), json.loads(json.dumps(self.numbers)))


SUFFIXES = ("", ".buffers", ".integers")  # of a model's arrays: its vector, its running statistics, its counts

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


def _unshared(arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors that share storage, which safetensors refuses; a personal model and its best often do."""
    seen: set[int] = set()
    result = {}
    for name, tensor in arrays.items():
        key = tensor.untyped_storage().data_ptr()
        result[name] = tensor.clone() if key in seen else tensor
        seen.add(key)
    return result


# ---- Sealed files --------------------------------------------------------------------------------------------------


def write_sealed(path: Path, tensors: Mapping[str, Tensor], texts: Mapping[str, str], keep: Path | None = None) -> None:
    """Write tensors, and texts into the header, atomically; ``keep`` gets the previous file."""
    plain = memoryview(safetensors.torch.save(dict(tensors)))
    start = 8 + int.from_bytes(plain[:8], "little")
    content = {"__metadata__": {"sha256": BLANK.decode(), **texts}, **json.loads(bytes(plain[8:start]))}
    header = json.dumps(content, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)  # tensors begin at a multiple of 8 bytes
    begin = len(header).to_bytes(8, "little") + header
    found = hashlib.sha256(begin)
    found.update(plain[start:])
    begin = begin.replace(BLANK, found.hexdigest().encode(), 1)

    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:
            file.writelines((begin, plain[start:]))

    write_atomically(path, write, keep=keep)


def read_sealed(path: Path, texts: Collection[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return tensors and texts of a sealed file. ``texts``: the header keys that older files without a seal may have.

    Raises OSError, or ValueError if the file is damaged.
    """
    whole = _is_whole(path)
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            found = file.metadata() or {}
            if not whole:
                if not found.keys() <= set(texts):
                    raise DataError("it is damaged: its header is not as it was written")
                _tell_of_age()
            # Copies: a view into the file has another alignment than memory, and sums then differ in the last bits.
            return {name: file.get_tensor(name).clone() for name in file.keys()}, found  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise DataError(str(error)) from error


def _is_whole(path: Path) -> bool:
    """Return whether the file has a seal; raise DataError if the seal does not match."""
    with path.open("rb") as file:
        start = file.read(8 + len(BEFORE_SEAL))
        if not start.endswith(BEFORE_SEAL):
            return False
        seal = file.read(len(BLANK))
        found = hashlib.sha256(start + BLANK)
        while piece := file.read(PIECE):
            found.update(piece)
    if seal != found.hexdigest().encode():
        raise DataError("it is damaged: its SHA-256 is not the one that was written")
    return True


@functools.cache
def _tell_of_age() -> None:
    """Log a warning once per process: there may be many such files."""
    log(WARNING, "there are files of an earlier version, without a SHA-256: if one is damaged it need not be seen")
