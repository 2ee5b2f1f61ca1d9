"""The silo's half: a newcomer's model before it trains, and after it has trained what is its own.

A newcomer has no state. It sends nothing but metrics: of the model that it starts from (``received``: zero-shot), and
of its own after E epochs with all that is shared held fixed (``personal``). ``MethodInfo.newcomer`` says which kind of
model that is; a method whose kind leaves something open overrides :meth:`SiloClient.newcomer` or
:meth:`SiloClient.personalise` in its file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.flat import is_finite
from partitions.common.errors import UserError
from strategies.base.client import SiloClient

NEWCOMER = "newcomer"  # in a message's config: the silo is to be evaluated as one


def evaluate_newcomer(client: SiloClient, config: Mapping[str, Any]) -> dict[str, float]:
    """Metrics of both models; the client's state is to be thrown away. Raises UserError where training diverges."""
    client.received = client.begin(config)
    client.received_buffers = client.model.buffers.clone()
    start = client.received = client.newcomer().clone()
    metrics = client.measure("received", start)
    client.model.load(start, client.received_buffers)
    own = client.personalise().clone()
    if not is_finite(own):
        raise UserError("the personalisation diverged (a lower learning-rate may help)")
    client.replies.clear()  # what a method tells its server in a round
    return metrics | client.measure("personal", own)
