"""The check of a received model in a silo that limits its server's steps.

A model crafted to read records (a layer that imprints them, an oracle for one patient's label) is far from every model
of the run. So the first received model must be the seed's, and each later one near the silo's own last one. With
differential privacy the own one may have no noise, and a refusal would reveal its distance: each later model must be
near the last *received* one, which the server has.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from models.flat import gather
from partitions.common.errors import UserError

RECEIVED = "received"  # the entry of a silo's state with the last received model, with dp and a step


def check_step(client: Any, received: Tensor) -> None:
    """Raise UserError for a model (Σ,) beyond the ``step`` of the study that a silo trains under.

    ``client``: its :class:`SiloClient`, which has the message. In an evaluation, the study fixes the models.
    """
    most, last, first = client.silo.max_step, client.previous, client.previous is None
    if not (math.isfinite(most) and client.info.trains):
        return
    if first:
        last = client.first_model()
    elif client.privacy is not None:
        parts = client.model.layout.parts(client.received_blocks())
        if not parts or (before := client.state.arrays.get(RECEIVED)) is None:
            return  # nothing is trained from; a state of an earlier version
        received, last = gather(received, parts), gather(before, parts)
    check_received(client.silo.name, client.round, received, last, most, first=first and client.round <= 1)


def check_received(silo: str, this: int, received: Tensor, last: Tensor, most: float, *, first: bool) -> None:
    """Raise UserError for a model that no honest server sends in round ``this``.

    ``received`` (Σ,): the model; ``last`` (Σ,): the last one, before the silo's first training the seed's.
    ``first``: it must equal that one bit for bit. Else ||received - last|| may be at most ``most`` times ||last||.
    """
    if first:
        if not torch.equal(received, last):
            raise UserError(f"{silo} refuses: the first model is not the one that the run's seed gives")
        return
    step = float((received - last).norm() / last.norm())
    if not step <= most:
        raise UserError(
            f"{silo} refuses: the model of round {this} is {step:.3g} lengths away from its last one, and the "
            f"study has step = {most:g}"
        )
