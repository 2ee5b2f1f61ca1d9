"""pFedLA: rounds with hypernetworks in numpy, the sign, the gradient by differences, the special cases (B28)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from near import near
from tiny import SHORT, comparable, federate, initial, random_silos, rows_of, same, settings_of
from torch.testing import assert_close
from two_layers import DEEP, FC1, FC2, deep_gradient, replies_of, sent_by

import strategies.pfedla
from models.initialisation import flat_model
from models.networks.mlp import MlpSettings
from models.training import generator
from strategies.base.plan import RoundPlan, SiloInfo
from strategies.base.transport.payload import Update
from strategies.pfedla import LaSettings, PFedLA, first_hypernetwork, layer_weights

SMALL = {"pfedla__embedding": 3, "pfedla__hidden": 5, "pfedla__hyper_learning_rate": 0.5}
OPTIONS = {**DEEP, **SMALL, "strategy": "pfedla", **SHORT}
BYTES = ("round_seconds", "bytes_down", "bytes_up")


def outputs(values, size=3, hidden=5):
    """A hypernetwork whose scores are these, whatever its embedding: all weights 0, d = the scores."""
    zeros = size + hidden * size + hidden + len(values) * hidden
    return torch.cat([torch.zeros(zeros), torch.tensor(values)])


def start_with(monkeypatch, scores):
    """Every silo's hypernetwork starts so; the silos come in the order of their names."""
    names = iter(sorted(scores))
    monkeypatch.setattr(
        strategies.pfedla, "first_hypernetwork", lambda *_: outputs(scores[next(names)])
    )


# ---- By hand and in numpy --------------------------------------------------------------------------------------------


def method(models, scores, rate):
    """A server with these models of a linear layer, one column and two classes (4 numbers, one block)."""
    layout = flat_model("mlp", (1,), 2, MlpSettings(""), "cpu").layout
    settings = LaSettings(embedding=3, hidden=5, hyper_learning_rate=rate)
    strategy = PFedLA(settings_of({}, silos=1).common, settings, layout)
    plan = RoundPlan().with_silos(
        [SiloInfo(n, i, 1) for i, n in enumerate(models)], strategy.common
    )
    strategy.initialise(plan, lambda _: torch.zeros(4))
    for name, values in models.items():
        strategy.state.arrays |= {
            f"model.{name}": torch.tensor(values).float(),
            f"hyper.{name}": outputs(scores[name]),
        }
    return strategy


def test_a_step_by_hand():
    """θ_a = 0, θ_b = (1, 1, 2, 0), scores of a (3, 1): α = (3/4, 1/4), θ̄_a = θ_b / 4. a sends θ̄_a + (0, 1, 1, 0).

    Received less trained: -(0, 1, 1, 0); G = (0, -3), sum_m α_m G_m = -3/4, so ds = (3/4, -9/4) / 4, which is the
    gradient of d. With η_hn = 4 the scores become (3 - 3/4, 1 + 9/4): α_b = 13/22, up from 1/4. The weights before d
    see a hidden layer of zeros and stay.
    """
    strategy = method(
        {"a": [0, 0, 0, 0], "b": [1, 1, 2, 0]}, {"a": [3, 1], "b": [1, 1]}, rate=4.0
    )
    sent = strategy.payload("a").models["global"].vector
    assert sent.tolist() == [0.25, 0.25, 0.5, 0]
    trained = sent + torch.tensor([0.0, 1, 1, 0])
    strategy.aggregate([Update("a", 1, {"model": trained}, {}, {})])
    assert strategy.state.arrays["hyper.a"].tolist() == pytest.approx(
        outputs([2.25, 3.25]).tolist()
    )
    assert same(strategy.state.arrays["hyper.b"], outputs([1, 1]))
    assert same(strategy.state.arrays["model.a"], trained)
    alphas = strategy.alphas(strategy.state.arrays["hyper.a"])
    assert alphas.tolist() == [pytest.approx([9 / 22, 13 / 22])]


@pytest.mark.parametrize("towards", [0.5, 0.01, -0.01, -0.5])
def test_who_moves_towards_another_takes_more_of_it(towards):
    """The sign: a silo whose training goes to θ_2 sees α_2 grow, and shrink where it goes away. Random models."""
    torch.manual_seed(1)
    models = {name: torch.randn(4).tolist() for name in ("a", "b")}
    strategy = method(models, {"a": [1.0, 1.0], "b": [1.0, 1.0]}, rate=0.1)
    before = strategy.alphas(strategy.state.arrays["hyper.a"])[0, 1]
    sent = strategy.payload("a").models["global"].vector
    away = torch.tensor(models["b"]) - torch.tensor(models["a"])
    strategy.aggregate([Update("a", 1, {"model": sent + towards * away}, {}, {})])
    after = strategy.alphas(strategy.state.arrays["hyper.a"])[0, 1]
    assert (after > before) == (towards > 0) and after != before


class Hyper:
    """A hypernetwork in float64 numpy, with its gradient written out."""

    def __init__(self, phi, size, hidden, layers, silos):
        shapes = [
            (size,),
            (hidden, size),
            (hidden,),
            (layers * silos, hidden),
            (layers * silos,),
        ]
        ends = np.cumsum([np.prod(shape) for shape in shapes])
        self.parts = [
            p.reshape(s).copy() for p, s in zip(np.split(phi, ends[:-1]), shapes, strict=True)
        ]
        self.layers, self.silos = layers, silos

    def alphas(self):
        v, weight, bias, out, out_bias = self.parts
        self.inner = weight @ v + bias
        self.h = np.maximum(self.inner, 0)
        self.s = (out @ self.h + out_bias).reshape(self.layers, self.silos)
        r = np.maximum(self.s, 0)
        self.total = r.sum(1, keepdims=True)
        # A layer without a score above 0 has equal weights, and stands still
        self.live = self.total > 0
        self.a = np.where(self.live, r, 1 / self.silos) / np.where(self.live, self.total, 1)
        return self.a

    def step(self, g, rate):
        v, weight, _, out, _ = self.parts
        inside = (self.s > 0) * (g - (self.a * g).sum(1, keepdims=True))
        ds = (inside / np.where(self.live, self.total, 1)).ravel()
        dinner = (out.T @ ds) * (self.inner > 0)
        grads = (weight.T @ dinner, np.outer(dinner, v), dinner, np.outer(ds, self.h), ds)
        self.parts = [part - rate * grad for part, grad in zip(self.parts, grads, strict=True)]


def test_rounds_of_several_steps_in_numpy(three):
    """Five rounds in float64; fc1 and fc2 have weights of their own; all present, unequal numbers of samples."""
    rate, rounds = 0.05, 5
    run = federate(
        three,
        **{
            **OPTIONS,
            "pfedla__hyper_learning_rate": rate,
            "rounds": rounds,
            "batch_size": 1000,
        },
        momentum=0.5,
    )
    names, start = list(three), run.start()
    models = dict.fromkeys(names, start)
    hypers = {}
    for name in names:
        rng = generator(run.settings.common.seed, "hypernetwork", name)
        phi = first_hypernetwork(LaSettings(embedding=3, hidden=5), 2, 3, rng).double().numpy()
        hypers[name] = Hyper(phi, 3, 5, 2, 3)
    first = {name: hypers[name].alphas().copy() for name in names}
    for _ in range(rounds):
        trained, grads = {}, {}
        for name in names:
            alphas = hypers[name].alphas()
            mixed = np.concatenate(
                [
                    sum(alphas[row, j] * models[other][part] for j, other in enumerate(names))
                    for row, part in enumerate((FC1, FC2))
                ]
            )
            x, y = rows_of(three[name])
            local, velocity = mixed.copy(), np.zeros_like(mixed)
            for _ in range(2):
                velocity = 0.5 * velocity + deep_gradient(local, x, y)
                local = local - 0.3 * velocity
            moved = mixed - local
            grads[name] = np.array(
                [[models[other][part] @ moved[part] for other in names] for part in (FC1, FC2)]
            )
            trained[name] = local
        for name in names:
            hypers[name].step(grads[name], rate)
        models = trained
    for name in names:
        near(run.personal(name), models[name])
        phi = run.held[f"hyper.{name}"].numpy()
        near(phi, np.concatenate([p.ravel() for p in hypers[name].parts]))
    assert max(np.abs(hypers[name].alphas() - first[name]).max() for name in names) > 0.01


@pytest.mark.parametrize("seed", range(5))
def test_the_gradient_by_differences(seed):
    """Of <α(φ), G> in float64, at random φ; where a layer's scores are all below 0, its weights are 1/N and still."""
    settings, torch_rng = LaSettings(embedding=4, hidden=6), torch.Generator().manual_seed(seed)
    phi = first_hypernetwork(settings, 3, 4, torch_rng).double()
    phi[-4:] = -50.0  # the last layer
    g = torch.randn(3, 4, generator=torch_rng, dtype=torch.float64)

    def value(phi):
        return (layer_weights(phi, settings, 3, 4) * g).sum()

    alphas = layer_weights(phi, settings, 3, 4)
    near(alphas.sum(1), torch.ones(3, dtype=torch.float64), 1e-5)
    assert alphas[2].tolist() == [0.25] * 4
    (gradient,) = torch.autograd.grad(value(variable := phi.clone().requires_grad_()), variable)
    steps = 1e-6 * torch.eye(len(phi), dtype=torch.float64)
    differences = torch.stack([(value(phi + e) - value(phi - e)) / 2e-6 for e in steps])
    assert_close(gradient, differences, rtol=1e-5, atol=1e-8)
    assert not gradient[-4:].any() and gradient.any()


# ---- Special cases ---------------------------------------------------------------------------------------------------


def test_a_weight_of_one_for_itself_is_local(three, monkeypatch):
    """Bit for bit but for the bytes: θ_i + 1 · 0 + 0 · (θ_j - θ_i)."""
    own = {n: [float(i == j) for _ in range(2) for j in range(3)] for i, n in enumerate(three)}
    start_with(monkeypatch, own)
    options = {
        k: v for k, v in OPTIONS.items() if not k.startswith("pfedla") and k != "strategy"
    }
    plain = federate(three, "local", **options)
    run = federate(three, **{**OPTIONS, "pfedla__hyper_learning_rate": 0.0})
    assert comparable(plain.rows, without=BYTES) == comparable(run.rows, without=BYTES)


@pytest.mark.parametrize("score", [2.0, -1.0])
def test_equal_weights_start_everybody_from_the_plain_mean(tmp_path, score, monkeypatch):
    """Also where no score is above 0. With equal numbers of samples that is FedAvg, up to rounding."""
    equal = random_silos(tmp_path, [8, 8, 8])
    start_with(monkeypatch, {n: [score] * 6 for n in equal})
    options = {
        k: v for k, v in OPTIONS.items() if not k.startswith("pfedla") and k != "strategy"
    }
    plain = federate(equal, "fedavg", **options)
    run = federate(equal, **{**OPTIONS, "pfedla__hyper_learning_rate": 0.0})
    for silo in equal:
        near(run.personal(silo), plain.personal(silo))


def test_equal_models_mix_to_themselves(three):
    """In round 1 everybody gets the initial model bit for bit, and no hypernetwork learns from it."""
    run = federate(three, **{**OPTIONS, "rounds": 1})
    start = initial(run.settings, 3, 3)
    assert all(same(run.received(silo, 1), start) for silo in three)
    for name in three:
        rng = generator(run.settings.common.seed, "hypernetwork", name)
        first = first_hypernetwork(LaSettings(embedding=3, hidden=5), 2, 3, rng)
        assert same(run.held[f"hyper.{name}"], first)


def test_an_absent_silo_stays_as_it_was(three):
    """b is away in rounds 2 and 3: its hypernetwork and its model stay, and the others go on mixing that model."""
    run = federate(
        three, **OPTIONS, prepare=lambda grid: setattr(grid, "absent", {("b", 2), ("b", 3)})
    )
    arrays = run.held
    assert same(arrays["model.b"], sent_by(run, "b", -1))
    rng = generator(run.settings.common.seed, "hypernetwork", "b")
    assert same(
        arrays["hyper.b"], first_hypernetwork(LaSettings(embedding=3, hidden=5), 2, 3, rng)
    )
    last = {s: sent_by(run, s, -1) for s in three}
    alphas = layer_weights(arrays["hyper.a"], LaSettings(embedding=3, hidden=5), 2, 3)
    for row, part in enumerate((FC1, FC2)):
        mixed = sum(a * last[s][part] for a, s in zip(alphas[row], three, strict=True))
        near(run.received("a", 4)[part], mixed, 1e-5)
    assert [r for r, _, _, _ in replies_of(run, "a")] == [1, 2, 3]
