"""The silo's half: a newcomer's model before training, and after training its own part.

A newcomer has no state. It sends only metrics: of the model that it starts from (``received``: zero-shot), and of its
own model after E epochs with the shared part fixed (``personal``). ``MethodInfo.newcomer`` declares the kind of model.
A method that needs more overrides :meth:`SiloClient.newcomer` or :meth:`SiloClient.personalise` in its file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.flat import is_finite
from partitions.common.errors import UserError
from strategies.base.client import SiloClient

NEWCOMER = "newcomer"  # in a message's config: the silo is to be evaluated as one


def evaluate_newcomer(client: SiloClient, config: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics of both models; the caller discards the client's state. Raises UserError if training diverges."""
    client.received = client.begin(config)
    client.note_received()
    start = client.received = client.newcomer().clone()
    metrics = client.measure("received", start)
    client.model.load(start, client.received_buffers, client.received_integers)
    own = client.personalise().clone()
    if not is_finite(own):
        raise UserError("the personalisation diverged (a lower learning-rate may help)")
    client.replies.clear()  # the numbers that a method sends in a round
    return metrics | client.measure("personal", own)
