"""The silo's half: a newcomer's model before it trains, and after it has trained what is its own.

A newcomer has no state. It sends nothing but metrics: of the model that it starts from (``received``: zero-shot), and
of its own after E epochs with all that is shared held fixed (``personal``). ``MethodInfo.newcomer`` says which kind of
model that is; a method whose kind leaves something open overrides :meth:`NewcomerClient.newcomer` or
:meth:`NewcomerClient.personalise` in its file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from models.flat import FlatModel, is_finite
from partitions.common.errors import UserError
from strategies.base.info import MethodInfo
from strategies.base.transport.payload import Number

NEWCOMER = "newcomer"  # in a message's config: the silo is to be evaluated as one


class NewcomerClient:
    """Part of :class:`SiloClient`."""

    info: MethodInfo
    model: FlatModel
    received: Tensor
    received_buffers: Tensor
    replies: dict[str, Number]
    train: Callable[..., None]
    measure: Callable[[str, Tensor], dict[str, float]]
    begin: Callable[[Mapping[str, Any]], Tensor]

    def newcomer(self) -> Tensor:
        """The model (Σ,) that a silo without a state has before it trains."""
        return self.received

    def personalise(self) -> Tensor:
        """A newcomer's own model (Σ,), after local-epochs epochs from :meth:`newcomer`'s, which ``self.model`` holds.

        All that is shared stays as it was received.
        """
        if self.info.newcomer != "model":
            self.train()
        return self.model.vector

    def evaluate_newcomer(self, config: Mapping[str, Any]) -> dict[str, float]:
        """Metrics of both models; the state is to be thrown away. Raises UserError where training diverges."""
        self.received = self.begin(config)
        self.received_buffers = self.model.buffers.clone()
        start = self.received = self.newcomer().clone()
        metrics = self.measure("received", start)
        self.model.load(start, self.received_buffers)
        own = self.personalise().clone()
        if not is_finite(own):
            raise UserError("the personalisation diverged (a lower learning-rate may help)")
        self.replies.clear()  # what a method tells its server in a round
        return metrics | self.measure("personal", own)
