"""The model that all silos share, of the round that a run's report takes its scores from so far."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from strategies.base.client import BUFFERS, GLOBAL
from strategies.base.strategy import PersonalizedStrategy

NAMES = (GLOBAL, BUFFERS)
REPORTED = "reported-"  # begins the names of the arrays of the model that the report shows


def shared_arrays(arrays: Mapping[str, Tensor], method: type[PersonalizedStrategy], size: int) -> dict[str, Tensor]:
    """Return the model (Σ,) that all silos share, with its running statistics; empty where a method has none."""
    whole = GLOBAL in arrays and arrays[GLOBAL].shape == (size,)
    shares = method.info.one_model or "model" in method.info.uploads
    return {name: arrays[name] for name in NAMES if name in arrays} if whole and shares else {}
