"""Numbers that are equal up to a distance."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def near(found: Any, expected: Any, within: float = 1e-6) -> None:
    """One shape, or one number for all; nothing is further away than ``within``.

    Tensors have one type, or one of them is a reference in double precision.
    """
    types = {value.dtype for value in (found, expected) if isinstance(value, torch.Tensor)}
    assert len(types) < 2 or torch.float64 in types
    a, b = (np.asarray(_plain(value), np.float64) for value in (found, expected))
    assert b.shape in ((), a.shape)
    np.testing.assert_allclose(a, b, rtol=0, atol=within)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().double().numpy()
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value
