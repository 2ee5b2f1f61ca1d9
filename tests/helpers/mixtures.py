"""The mixing methods' coefficients of models that a test makes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from models.layout import Layout
from strategies import strategies
from strategies.base.settings import Common
from strategies.fedamp import MixingStrategy

EMPTY = Layout((), (), ())


def coefficients(name: str, models: Tensor, **changes: Any) -> Tensor:
    method = strategies()[name]
    assert issubclass(method, MixingStrategy)
    return method(Common(), method.Settings(**changes), EMPTY).coefficients(models)


def some_models(n: int, size: int = 7, scale: float = 1.0, seed: int = 0) -> Tensor:
    return scale * torch.randn(n, size, generator=torch.Generator().manual_seed(seed))
