"""The shared model of the round that a run's report would take its scores from."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from strategies.base.state import BUFFERS, GLOBAL
from strategies.base.strategy import PersonalizedStrategy

NAMES = (GLOBAL, BUFFERS)
REPORTED = "reported-"  # prefix of the array names of the model that the report shows


def shared_arrays(arrays: Mapping[str, Tensor], method: type[PersonalizedStrategy], size: int) -> dict[str, Tensor]:
    """Return the shared model (Σ,) and its running statistics; empty if the method has no shared model."""
    whole = GLOBAL in arrays and arrays[GLOBAL].shape == (size,)
    shares = method.info.one_model or "model" in method.info.uploads
    return {name: arrays[name] for name in NAMES if name in arrays} if whole and shares else {}
