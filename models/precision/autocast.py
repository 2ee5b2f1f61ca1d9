"""A network's forward pass in bfloat16 or float16 by ``torch.autocast``; its weights stay float32.

Outputs and features are float32 again, so that losses and all that methods do with vectors are as without it. Float16
has few exponents: :class:`LossScale` keeps small gradients from vanishing, as ``torch.amp.GradScaler`` does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
FIRST_SCALE = 2.0**16
GROWS_AFTER = 2000  # gradients without an overflow


def compute_in(module: nn.Module, precision: str, device: torch.device) -> None:
    """Let a module compute in this precision; ``float32`` undoes it."""
    if isinstance(vars(module).get("forward"), Lowered):
        del module.forward
    if precision in DTYPES:
        module.forward = Lowered(module.forward, DTYPES[precision], device.type)


class Lowered:
    """A forward pass under autocast."""

    def __init__(self, forward: Any, dtype: torch.dtype, device: str) -> None:
        self.forward = forward
        self.dtype = dtype
        self.device = device

    def __call__(self, *inputs: Any) -> Any:
        with torch.autocast(self.device, self.dtype):
            output = self.forward(*inputs)
        return output.float() if isinstance(output, Tensor) else output


class LossScale:
    """The factor of a loss before its backward pass; ``GradScaler``'s, which skips a step where ours is repeated."""

    def __init__(self, precision: str) -> None:
        self.used = precision == "fp16"
        self.factor = FIRST_SCALE if self.used else 1.0
        self.good = 0

    def must_repeat(self, gradient: Tensor) -> bool:
        """Return whether the gradient overflowed; the next one is then computed with half the factor."""
        if not self.used:
            return False
        if not bool(gradient.isfinite().all()) and self.factor > 1:
            self.factor /= 2
            self.good = 0
            return True
        self.good += 1
        if self.good == GROWS_AFTER:
            self.factor *= 2
            self.good = 0
        return False
