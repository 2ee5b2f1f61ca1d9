"""`python -m benchmarks.flamby`: the two corrections of its docstring, and its start."""

from __future__ import annotations

import pytest
import torch
from near import near
from safetensors.torch import load_file

from benchmarks.flamby import BRCA, HEART, by_samples, write_start


def test_two_outputs_at_half_the_rate_are_one():
    """The log odds d = w1 - w0 of softmax take the step of a sigmoid's weight at twice the rate."""
    torch.manual_seed(0)
    x, y = torch.randn(12, 3), (torch.arange(12) % 2).long()
    single = torch.zeros(3, requires_grad=True)
    double = torch.zeros(2, 3, requires_grad=True)
    for _ in range(5):
        for weight, rate, loss in (
            (
                single,
                0.2,
                lambda w: torch.nn.functional.binary_cross_entropy_with_logits(
                    x @ w, y.float()
                ),
            ),
            (double, 0.1, lambda w: torch.nn.functional.cross_entropy(x @ w.t(), y)),
        ):
            (gradient,) = torch.autograd.grad(loss(weight), weight)
            weight.data -= rate * gradient
    near(double[1] - double[0], single)


def test_the_start_is_flambys(tmp_path):
    """Our output, or the log odds of two, are those of torch's layer under the seed."""
    for benchmark in (BRCA, HEART):
        write_start(tmp_path / "start", benchmark, 42)
        torch.manual_seed(42)
        weight, _ = torch.nn.Linear(benchmark.columns, 1).parameters()
        ours = load_file(tmp_path / "start")["fc1.weight"]
        assert torch.equal(ours[-1:] - (ours[:1] if benchmark is HEART else 0), weight)


def test_the_loss_is_divided_by_samples():
    """By hand, scores 0: T = 3, 2, 1 with events at 2 and 1. The risk sets have 2 and 3: (log 2 + log 3) / 3."""
    outputs, y = torch.zeros(3, 1), torch.tensor([[3.0, 0.0], [2.0, 1.0], [1.0, 1.0]])
    assert by_samples(outputs, y).item() == pytest.approx((0.693147 + 1.098612) / 3)
