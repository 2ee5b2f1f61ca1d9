"""What the server reads of a round's replies, by the strategy's plan; a silo with an unusable one is rejected."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

from flwr.app import Message, MessageType
from torch import Tensor

from strategies.base.aggregation.secure import with_sum
from strategies.base.state import BUFFERS
from strategies.base.transport.error_feedback import base_of
from strategies.base.transport.payload import (
    ExpectedReply,
    Update,
    check_statistics,
    read_update,
)
from strategies.base.transport.reporting import read_replies

T = TypeVar("T")


def read_updates(strategy: Any, replies: Iterable[Message]) -> list[Update]:
    """Return the usable updates, sorted by silo; they and the state move to the first one's device (a simulation's)."""
    updates = read_usable(
        strategy, replies, MessageType.TRAIN, lambda reply, silo: _read(strategy, reply, silo)
    )
    device = next((vector.device for u in updates for vector in u.vectors.values()), None)
    if device is None:
        return updates
    state = strategy.state
    state.arrays = {name: tensor.to(device) for name, tensor in state.arrays.items()}
    return [
        replace(u, vectors={n: vector.to(device) for n, vector in u.vectors.items()})
        for u in updates
    ]


def read_usable(
    strategy: Any, replies: Iterable[Message], kind: str, read: Callable[[Message, str], T]
) -> list[T]:
    """Return what ``read`` makes of each silo's reply of this kind; a silo with another reply is rejected."""
    usable, faults = read_replies(
        (r for r in replies if r.metadata.message_type == kind), strategy.plan.nodes, read
    )
    for silo, reason in faults.items():
        strategy.reject(silo, reason)
    return [usable[silo] for silo in sorted(usable)]


def _read(strategy: Any, reply: Message, silo: str) -> Update:
    """Return a train reply's update. Raises DataError if it is not usable."""

    def base(name: str, silo: str) -> Tensor | None:
        model = base_of(strategy.sent.get(silo, {}), name, strategy.upload_size(name, silo))
        return None if model is None else strategy.wire.arrives(model)

    names = strategy.upload_names()
    size = strategy.upload_size
    secure = strategy.common.secure_aggregation and bool(names)
    expected = ExpectedReply(
        method=strategy.info.name,
        round=strategy.round,
        samples=strategy.plan.samples,
        names=() if secure else names,
        size=size,
        numbers=tuple(strategy.info.sends_numbers),
        base=base,
    )
    update = read_update(reply, silo, expected)
    if secure:
        update = with_sum(reply, update, sum(size(name, silo) for name in names))
    if BUFFERS in update.vectors:
        parts = strategy.shared_buffers()
        check_statistics(update.vectors[BUFFERS], strategy.layout, parts)
    strategy.bytes_up += update.bytes
    strategy.check(update)
    return update
