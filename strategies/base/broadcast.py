"""The check of a received model in a silo that limits its server's steps.

A model crafted to read records (a layer that imprints them, an oracle for one patient's label) is far from every model
of the run. So the first received model must be the seed's, and each later one near the silo's own last one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from partitions.common.errors import UserError


def check_received(silo: str, this: int, received: Tensor, last: Tensor, most: float, *, first: bool) -> None:
    """Raise UserError for a model that no honest server sends in round ``this``.

    ``received`` (Σ,): the model; ``last`` (Σ,): the silo's own last one, before its first training the seed's.
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
