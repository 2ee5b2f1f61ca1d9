"""Which gradients may be replayed on a GPU: those whose every step is a library's. `test_cuda.py` replays them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from models import graphs
from models.flat import FlatModel, Passes
from models.networks.registry import build

X = torch.zeros(4, 1, 16, 16)


class Counting(nn.Linear):
    """A layer that does another thing in each pass, as a user's own may."""

    passes = 0

    def forward(self, x):
        self.passes += 1
        return super().forward(x) * self.passes


def network(change=lambda module: None):
    module = build("small-cnn", (1, 16, 16), 3)
    change(module)
    return FlatModel(module)


def with_own_layer(module):
    name, layer = [one for one in module.named_modules() if isinstance(one[1], nn.Linear)][-1]
    owner, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(owner), leaf, Counting(layer.in_features, layer.out_features))


def hooked(module):
    next(module.children()).register_forward_pre_hook(lambda layer, given: None)


def test_a_small_network_of_silofl_is_replayed():
    assert graphs._repeats(network(), X, cross_entropy)


@pytest.mark.parametrize("change", [with_own_layer, hooked])
def test_a_pass_that_runs_code_of_somebody_s_own_is_not(change):
    assert not graphs._repeats(network(change), X, cross_entropy)


def test_what_is_drawn_or_differs_from_batch_to_batch_is_not(monkeypatch):
    model = network()
    assert not graphs._repeats(model, (X, X), cross_entropy)
    assert not graphs._repeats(model, X, partial(cross_entropy, label_smoothing=0.1))
    assert not graphs._repeats(model, torch.zeros(4000, 1, 16, 16), cross_entropy)
    model.compute(Passes(precision="fp16"))
    assert not graphs._repeats(model, X, cross_entropy)
    model.compute(Passes(2))
    assert not graphs._repeats(model, X, cross_entropy)
    model.compute(Passes())
    model.has_dropout = True
    assert not graphs._repeats(model, X, cross_entropy)
    monkeypatch.setattr(graphs, "MOST_PARAMETERS", 10)
    assert not graphs._repeats(network(), X, cross_entropy)
