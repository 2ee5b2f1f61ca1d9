"""The one-run audit: never above the claimed epsilon, and planted faults are found. And what a step takes of memory."""

from __future__ import annotations

import pytest
from near import near

from benchmarks.dp_audit import FAULTS, audit, lower_bound
from benchmarks.dp_step import peak, steps


def test_the_bound_is_the_published_one():
    """reference values: 100 of 100 guesses of 500 canaries; 60 of 100; none above chance."""
    near(lower_bound(100, 100, 500, 1e-5), 3.479, 1e-3)
    near(lower_bound(100, 60, 200, 1e-5), 0.051, 1e-3)
    assert lower_bound(100, 50, 200, 1e-5) == 0.0


@pytest.mark.parametrize("fault", FAULTS)
def test_the_audit_finds_faults_and_only_these(fault):
    found = audit(1.0, fault=fault, canaries=1000, others=500, guesses=100, rounds=2)
    assert {f.view for f in found} == {"gradients", "sent", "exported"}
    assert all(f.claimed <= 1.0 < f.most for f in found)
    assert any(f.bound > f.claimed for f in found) == (fault != "none")


@pytest.mark.parametrize("network", ["fedala-cnn", "small-cnn", "fasttext", "fedapm-signals"])
def test_a_private_step_has_at_most_twice_a_plain_step_s_memory(network):
    """With the model, its gradient and the batch; of a few numbers a step is more, which are kilobytes."""
    calls, clipping, (x, _) = steps(network, 64)
    kept = 8 * clipping.model.layout.size + x.numel() * x.element_size()
    assert all(clipping.tried.values())
    plain, private = (kept + peak(calls[what]) for what in ("plain", "private"))
    assert kept < plain and kept < private <= 2 * plain
