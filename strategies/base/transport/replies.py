"""Silos' replies, read and checked: an invalid one raises DataError with one line, and the others go on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from logging import ERROR

import torch
from flwr.app import Message
from flwr.common import log
from torch import Tensor

from models.flat import is_finite, scatter
from models.layout import Layout
from partitions.common.errors import DataError
from strategies.base.schema.reporting import read_metrics, reason_of
from strategies.base.transport.payload import BUFFERS, Number, Payload, decode


@dataclass(frozen=True)
class Update:
    """A silo's reply: the vectors named in its client's ``uploads``, and the method's numbers."""

    silo: str
    samples: int
    vectors: Mapping[str, Tensor]
    numbers: Mapping[str, Number]
    metrics: Mapping[str, float]
    bytes: int = 0  # of its vectors, on the wire

    @property
    def vector(self) -> Tensor:
        """The first, and usually the only, vector."""
        return next(iter(self.vectors.values()))


@dataclass(frozen=True)
class Expected:
    """The requirements on a reply of this round: method, round, and the names and lengths of its vectors."""

    method: str
    round: int
    samples: Mapping[str, int]  # each silo's weight in a mean; the reply's own number is not used
    names: tuple[str, ...]
    size: Callable[[str, str], int]  # (vector, silo) -> length
    numbers: tuple[str, ...]  # the method's numbers that are read
    base: Callable[[str, str], Tensor | None] = lambda name, silo: None  # (vector, silo) -> base of an encoded one


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
        raise DataError(f"the reply cannot be read ({type(error).__name__}: {error})") from error


def read_update(reply: Message, silo: str, expected: Expected) -> Update:
    """Return a silo's train reply as an Update; raise DataError if it does not meet ``expected``."""
    payload, config = read_reply(
        reply, silo, lambda name: expected.base(name, silo) if name in expected.names else None
    )
    named, number = config.get("silo"), config.get("round")
    if number != expected.round or named != silo or silo not in expected.samples:
        raise DataError(f"a reply of {named!r:.80} for round {number!r:.80}, not of {silo} for {expected.round}")
    metrics = read_metrics(reply.content.get("metrics"))
    missing, unknown = set(expected.names) - set(payload.models), set(payload.models) - set(expected.names)
    if missing:
        raise DataError(f"the reply lacks {', '.join(sorted(missing))}")
    if unknown:
        raise DataError(f"the reply holds {', '.join(sorted(unknown))}, which {expected.method} does not send")
    vectors = {name: payload.models[name].vector for name in expected.names}
    for name, vector in vectors.items():
        check_vector(name, vector, expected.size(name, silo))
    numbers = {name: payload.numbers[name] for name in expected.numbers if name in payload.numbers}
    came = sum(payload.models[name].bytes for name in expected.names)
    return Update(silo, expected.samples[silo], vectors, numbers, metrics, came)


def check_vector(name: str, vector: Tensor, size: int) -> None:
    """Raise DataError if a vector is not float32 of this length, or not finite."""
    if vector.dtype != torch.float32 or vector.shape != (size,):
        raise DataError(f"'{name}' is {vector.dtype} of shape {tuple(vector.shape)}, not float32 of ({size},)")
    if not is_finite(vector):
        raise DataError(f"'{name}' holds values that are not finite: the local training diverged")


def check_statistics(vector: Tensor, layout: Layout, parts: Sequence[slice]) -> None:
    """Raise DataError if BatchNorm statistics of these parts contain a variance below 0."""
    whole = scatter(vector.new_zeros(layout.buffer_size), tuple(parts), vector)
    entries = [e for e in layout.buffers if e.name.endswith("running_var")]
    if any(bool((whole[e.start : e.stop] < 0).any()) for e in entries):
        raise DataError(f"'{BUFFERS}' holds a variance below 0")
