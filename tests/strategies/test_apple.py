"""APPLE: two silos by hand, the gradient of p, the download rule, and the special cases of the reference (A1)."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import Error, Message
from near import near
from tiny import (
    TinyGrid,
    client_of,
    federate,
    forget_models,
    gradient,
    initial,
    random_silos,
    round_of,
    rows_of,
    same,
    session_of,
    settings_of,
)
from torch import Tensor
from torch.testing import assert_close

from models.tasks import MULTICLASS
from server.run.reporter import Progress
from strategies.apple import AppleClient, loss_schedule
from strategies.base.state import State
from strategies.base.transport.payload import Model, model_of


def test_two_silos_two_rounds_by_hand(pair, zero_start):
    """η1 = 1, η2 = 0.1, cores start at 0, p_0 = (1/4, 3/4); every core is (u, -u, v, -v): u, v are given.

    Round 1: w^p = 0, so g_a = (-1, -1/2), g_b = (1/2, 1/2) (see test_fedavg). The p-gradient is <g, 0> = 0, and
    core_a = 1/4 (1, 1/2), core_b = -3/4 (1/2, 1/2).
    Round 2, a: w^p = 1/4 (1/4, 1/8) + 3/4 (-3/8, -3/8) = (-7/32, -1/4), logit difference 2 (2 u + v) = -11/8. With
    s = 1 - 1 / (1 + e^(11/8)): g = (-2 s, -s). Inner products count u and v twice:
    <g, core_a> = 2 (-2 s / 4 - s / 8) = -5/4 s, <g, core_b> = 2 (2 s + s) 3/8 = 9/4 s. p is still p_0, so there is no
    proximal gradient. p_a = (1/4 + 0.1 5/4 s, 3/4 - 0.1 9/4 s), core_a = (1/4, 1/8) + 1/4 (2 s, s).
    """
    run = federate(
        pair,
        "apple",
        rounds=2,
        apple__dr_learning_rate=0.1,
        apple__mu=0.5,
        apple__prox_share=1.0,
    )
    first = {name: m.vector.tolist() for name, m in run.sent_to("a", 2).items()}
    assert first == {"b": [-3 / 8, 3 / 8, -3 / 8, 3 / 8]}
    s = 1 - 1 / (1 + math.exp(11 / 8))
    own = np.array([1 / 4 + s / 2, -1 / 4 - s / 2, 1 / 8 + s / 4, -1 / 8 - s / 4])
    near(run.held["model.a"], own)
    dr = np.array([1 / 4 + 0.125 * s, 3 / 4 - 0.225 * s])
    near(run.kept("a")["dr"], dr)
    # The personal model mixes the new own core with the other core as it was received.
    expected = dr[0] * own + dr[1] * np.array([-3 / 8, 3 / 8, -3 / 8, 3 / 8])
    near(run.personal("a"), expected)
    near(run.values("loss", "a", "received")[1], math.log(1 + math.exp(11 / 8)))


@pytest.mark.parametrize("kind", ["cos", "exp"])
def test_rounds_of_several_steps_in_numpy(three, kind):
    """Equations 4 to 7 in float64: three steps a round, momentum, decay, and λ over L = 3 of 4 rounds."""
    mu, eta1, eta2, momentum, decay = 0.7, 0.8, 0.2, 0.5, 0.9
    run = federate(
        three,
        "apple",
        rounds=4,
        local_epochs=3,
        learning_rate=eta1,
        momentum=momentum,
        lr_decay=decay,
        apple__dr_learning_rate=eta2,
        apple__mu=mu,
        apple__prox_share=0.75,
        apple__scheduler=kind,
        apple__common_init=False,
    )
    schedule = {"cos": [1, 0.75, 0.25, 0], "exp": [1, 0.1, 0.01, 0]}[kind]
    data = [rows_of(file) for file in three.values()]
    p0 = np.array([6, 10, 8]) / 24
    cores = np.stack([initial(run.settings, 3, 3, name).double().numpy() for name in three])
    p = np.stack([p0] * 3)
    for r in range(4):
        new = cores.copy()
        for i, (x, y) in enumerate(data):
            mine, v_core, v_p = cores.copy(), np.zeros(12), np.zeros(3)
            for _ in range(3):
                g = gradient(p[i] @ mine, x, y)
                v_core = momentum * v_core + p[i, i] * g
                v_p = momentum * v_p + mine @ g + schedule[r] * mu * (p[i] - p0)
                mine[i] -= eta1 * decay**r * v_core
                p[i] = p[i] - eta2 * decay**r * v_p
            new[i] = mine[i]
        cores = new
    for i, name in enumerate(three):
        near(run.held[model_of(name)], cores[i], 2e-5)
        near(run.kept(name)["dr"], p[i], 2e-5)


def test_loss_schedule_by_hand():
    """cos: (cos 0 + 1) / 2 = 1, (cos π/3 + 1) / 2 = 3/4, at half of L 1/2, then 0; exp: ε^0, ε^(1/2) = 10^-1.5."""
    assert loss_schedule(0, 6, "cos") == 1
    assert loss_schedule(2, 6, "cos") == pytest.approx(0.75)
    assert loss_schedule(3, 6, "cos") == pytest.approx(0.5)
    assert loss_schedule(0, 6, "exp") == 1
    assert loss_schedule(3, 6, "exp") == pytest.approx(10**-1.5)
    assert loss_schedule(5, 6, "exp") == pytest.approx(10**-2.5)
    for kind in ("cos", "exp"):
        assert (
            loss_schedule(6, 6, kind)
            == loss_schedule(9, 6, kind)
            == loss_schedule(0, 0, kind)
            == 0
        )


# ---- One step of one silo ------------------------------------------------------------------------------------------


def silo_client(files, cores, dr, server_round=2, **changes):
    """Silo a's half with this DR vector and the others' cores received (cores in the order of the silos' names)."""
    forget_models()
    settings = settings_of(files, strategy="apple", **changes)
    grid = TinyGrid(files, settings)
    state = State({"dr": dr, "core.a": cores[0]})
    client = client_of(
        settings, session_of(settings, grid.contexts[1], classes=3).silo, state, server_round
    )
    assert isinstance(client, AppleClient)
    names = sorted(files)
    client.models = {model_of(n): Model(cores[i], n) for i, n in enumerate(names) if n != "a"}
    client.numbers = {"samples": json.dumps(dict(zip(names, (6, 10, 8), strict=True)))}
    client.model.load(client.receive())
    return client


def test_autograd_finds_the_same_gradients(three):
    """With a hidden layer: the gradients of eq. 7 by p and by w_i^c through the mix, against one step of the client."""
    size = 3 * 4 + 4 + 4 * 3 + 3
    generator = torch.Generator().manual_seed(4)
    cores, dr = torch.randn(3, size, generator=generator), torch.randn(3, generator=generator)
    options = {"rounds": 8, "apple__prox_share": 1.0, "apple__mu": 0.9, "mlp__hidden": "4"}
    client = silo_client(
        three, cores, dr.clone(), server_round=3, apple__dr_learning_rate=0.25, **options
    )
    model, train = client.model, client.silo.train
    p, own = dr.clone().requires_grad_(), cores[0].clone().requires_grad_()
    mixed = p @ torch.stack([own, cores[1], cores[2]])
    logits = torch.func.functional_call(
        model.module, model.layout.unflatten(mixed), (train.take(slice(None))[0],)
    )
    prior = torch.tensor([6.0, 10.0, 8.0]) / 24
    strength = (math.cos(math.pi * 2 / 8) + 1) / 2 * 0.9
    loss = (
        torch.nn.functional.cross_entropy(logits, train.y)
        + strength / 2 * (p - prior).square().sum()
    )
    by_p, by_core = torch.autograd.grad(loss, (p, own))
    core = client.local_update()[0]
    assert_close((dr - client.state.arrays["dr"]) / 0.25, by_p, rtol=1e-4, atol=1e-5)
    assert_close(cores[0] - core, by_core, rtol=1e-4, atol=1e-5)


def test_the_regulariser_adds_nothing_at_p0_and_sums_to_nothing_while_p_sums_to_one(three):
    """μ (p_j - p0_j) is 0 at p = p0; elsewhere it sums over j to μ (sum p - 1)."""
    cores = torch.randn(3, 12, generator=torch.Generator().manual_seed(5))
    options = {"rounds": 8, "apple__prox_share": 1.0, "apple__dr_learning_rate": 0.25}

    def dr_after_a_step(dr, mu):
        client = silo_client(three, cores, dr.clone(), server_round=1, apple__mu=mu, **options)
        client.local_update()
        return client.state.arrays["dr"]

    p0 = torch.tensor([6.0, 10.0, 8.0]) / 24
    assert same(dr_after_a_step(p0, 0.0), dr_after_a_step(p0, 50.0))
    other = torch.tensor([0.5, 0.75, -0.25])
    moved = dr_after_a_step(other, 0.0) - dr_after_a_step(other, 2.0)
    assert_close(moved, 0.25 * 2 * (other - p0), rtol=1e-4, atol=1e-5)
    near(float(moved.sum()), 0)


def test_p_is_never_projected(three):
    """Negative entries and sums other than one stay: with η2 = 0 a step leaves p as it is."""
    dr = torch.tensor([1.5, -0.75, 0.5])
    client = silo_client(three, torch.ones(3, 12), dr.clone(), apple__dr_learning_rate=0.0)
    client.local_update()
    assert same(client.state.arrays["dr"], dr)


# ---- Special cases -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes, initial_dr",
    [({"a": 8, "b": 8, "c": 8}, "samples"), ({"a": 6, "b": 8, "c": 8}, "uniform")],
)
def test_uniform_mix_of_one_step_is_fedavg(tmp_path, sizes, initial_dr):
    """p = 1/N frozen, η1 = N η: mean_j w_j moves by -(1/N) sum_j N η (1/N) g_j = -η mean_j g_j: one-step FedAvg.

    Equal n_i make FedAvg's weights 1/N. (With unequal n_i the mean is still the unweighted step, not FedAvg's.)
    """
    files = random_silos(tmp_path, sizes)
    plain = federate(files, "fedavg", rounds=4, learning_rate=0.3)
    apple = federate(
        files,
        "apple",
        rounds=4,
        learning_rate=0.9,
        apple__initial_dr=initial_dr,
        apple__dr_learning_rate=0.0,
        apple__common_init=True,
    )
    mean = torch.stack([apple.held[model_of(s)] for s in files]).mean(0)
    distance = float((mean - plain.shared).abs().max())
    assert (distance < 1e-6) == (len(set(sizes.values())) == 1)


# ---- Start ---------------------------------------------------------------------------------------------------------


def test_cores_start_independently_or_alike(three):
    run = federate(three, "apple", rounds=1, local_epochs=0, apple__common_init=False)
    cores = run.sent_to("a", 1)
    for name in three:
        assert same(cores[name].vector, initial(run.settings, 3, 3, name))
    assert not same(cores["a"].vector, cores["b"].vector)
    alike = federate(three, "apple", rounds=1, local_epochs=0)
    for model in alike.sent_to("a", 1).values():
        assert same(model.vector, initial(alike.settings, 3, 3))
    # sum p_0 = 1: the mix of equal models is that model.
    near(alike.personal("b"), initial(alike.settings, 3, 3), 1e-5)


@pytest.mark.parametrize(
    "start, expected",
    [("samples", [0.25, 10 / 24, 8 / 24]), ("uniform", [1 / 3] * 3), ("own", [0, 1, 0])],
)
def test_p_at_the_start(three, start, expected):
    run = federate(three, "apple", rounds=1, local_epochs=0, apple__initial_dr=start)
    assert run.kept("b")["dr"].tolist() == pytest.approx(expected)


# ---- What travels --------------------------------------------------------------------------------------------------


def test_an_absent_silos_core_stays(three):
    """c is away in round 2: the others get its core of round 1 again in round 3, and it goes on from its own."""

    run = federate(three, "apple", rounds=3, absent={("c", 2)}, apple__common_init=False)
    before, after = (run.sent_to("a", r)["c"] for r in (2, 3))
    assert same(before.vector, after.vector)
    assert (before.round, after.round) == (1, 1)
    assert run.sent_to("a", 3)["b"].round == 2
    # Its own too: the server cannot know why it was away
    assert run.sent_to("c", 3).keys() == {"a", "b", "c"}
    x, y = rows_of(three["c"])
    state = run.kept("c")
    p0 = np.array([6, 10, 8]) / 24
    received = [run.sent_to("c", 3)[n].vector.double().numpy() for n in "ab"]
    own = after.vector.double().numpy()
    round_1 = [initial(run.settings, 3, 3, n).double().numpy() for n in three]
    # λ is 0 from round 1 on: L = int(0.9)
    dr = p0 - 0.001 * np.stack(round_1) @ gradient(p0 @ np.stack(round_1), x, y)
    expected = own - dr[2] * gradient(dr @ np.stack([*received, own]), x, y)
    near(state["core.c"], expected, 1e-5)


def test_a_lost_first_reply_does_not_cost_the_silo_its_core(three, monkeypatch):
    """The server still has c's initial core and sends it again; c goes on from the one that it trained."""
    used = {}
    receive = AppleClient.receive

    def recording(self):
        result = receive(self)
        used[self.silo.name, self.round] = self.cores.clone()
        return result

    kept = []

    def prepare(grid):
        def after(silo, message, reply):
            if grid.key_of(message) != ("c", 1):
                return reply
            kept.append(grid.state("c").arrays["core.c"])
            return Message(Error(1, "the line is dead"), reply_to=message)

        grid.after = after

    monkeypatch.setattr(AppleClient, "receive", recording)
    run = federate(three, "apple", rounds=2, prepare=prepare)
    assert same(run.sent_to("c", 2)["c"].vector, run.sent_to("c", 1)["c"].vector)
    assert same(used["c", 2][2], kept[0])
    assert same(used["a", 2][2], run.sent_to("c", 1)["c"].vector)


def test_a_silo_that_lost_its_state_starts_again_from_what_the_server_holds(three, tmp_path):
    """c's state is gone before round 3: it misses that round, and in round 4 has its core of round 2 and p_0 again."""

    def prepare(grid):
        def before(silo, message, context):
            if (silo, round_of(message)) == ("c", 3):
                (folder,) = (tmp_path / "state").rglob("c")
                shutil.rmtree(folder)

        grid.before = before

    place = {"directory": tmp_path / "run", "state_dir": tmp_path / "state"}
    seen: list[Progress] = []
    run = federate(three, "apple", rounds=4, prepare=prepare, watch=seen.append, **place)
    assert [list(progress.rejected) for progress in seen] == [[], [], ["c"], []]
    assert "this silo has lost its state" in seen[2].rejected["c"]
    assert run.sent_to("c", 4)["c"].round == 2
    state = State.load(next((tmp_path / "state").rglob("c/*/round-000004.safetensors")))
    assert state.numbers["dr_rounds"] == [3, 4]
    assert same(state.arrays["dr_history"][0], torch.tensor([6.0, 10.0, 8.0]) / 24)


# ---- The download budget -------------------------------------------------------------------------------------------


@pytest.fixture
def five(tmp_path):
    return random_silos(tmp_path, dict.fromkeys("abcde", 6))


@pytest.mark.parametrize("model, budget", [("mlp", 1), ("mlp", 3), ("tiny-bn", 1)])
def test_unseen_cores_come_first(five, model, budget, tiny_bn):
    """The initial cores do not count: from round 2 on every silo has had all four others after ceil(4 / M) rounds."""
    run = federate(
        five, "apple", rounds=5, model=model, apple__max_downloads=budget, learning_rate=0.1
    )
    for silo in five:
        got = [set(run.sent_to(silo, r)) - {"buffers"} for r in range(2, 6)]
        assert all(len(names) == budget for names in got)
        needed = -(-4 // budget)
        assert set().union(*got[:needed]) == set(five) - {silo}


def test_cores_that_do_not_come_keep_their_cached_value(five, monkeypatch):
    """The cores a silo mixes are, for every other silo, those of the last message that had them."""
    used: dict[tuple[str, int], Tensor] = {}
    receive = AppleClient.receive

    def recording(self):
        result = receive(self)
        used[self.silo.name, self.round] = self.cores.clone()
        return result

    monkeypatch.setattr(AppleClient, "receive", recording)
    run = federate(five, "apple", rounds=6, apple__max_downloads=2)
    stale = 0
    for silo in five:
        last: dict[str, Model] = {}
        for r in range(1, 7):
            last |= run.sent_to(silo, r)
            for i, other in enumerate(sorted(five)):
                if other != silo:
                    assert same(used[silo, r][i], last[other].vector)
                    stale += last[other].round < r - 1
    assert stale > 20


def drawing_client(strengths, server_round):
    """Silo a of five with |p| as given, without data: only its download rule is asked."""
    from strategies.base.run_settings import parse_settings

    model = SimpleNamespace(compute=lambda _: None, module=torch.nn.Identity(), layout=None)
    nothing = SimpleNamespace(name="a", model=model, train=None, task=MULTICLASS, group=None)
    client = client_of(
        parse_settings({"strategy": "apple"}),
        nothing,  # type: ignore[arg-type]
        server_round=server_round,
    )
    assert isinstance(client, AppleClient)
    client.names, client.dr = list("abcde"), torch.tensor(strengths)
    return client


def draws(client, seen, budget, count):
    common = client.common
    for seed in range(count):
        client.common = dataclasses.replace(common, seed=seed)
        yield tuple(client.choose_downloads(seen, budget))


def test_what_was_never_downloaded_is_wanted_first():
    client = drawing_client([1, 9, 9, 9, 0], server_round=5)
    assert set(draws(client, set("bcd"), 1, 20)) == {("e",)}
    assert all(
        "e" in names and len(set(names)) == 2 for names in draws(client, set("bcd"), 2, 20)
    )
    assert {n for names in draws(client, set("b"), 2, 50) for n in names} == set("cde")


def test_ties_among_unseen_are_uniform():
    """Four unseen, one wanted, whatever p says: each 1/4, within 4.5 standard errors of 4000 seeded draws."""
    counts = Counter(draws(drawing_client([1, 9, 0, -3, 0.1], 9), set(), 1, 4000))
    assert set(counts) == {("b",), ("c",), ("d",), ("e",)}
    for count in counts.values():
        assert abs(count / 4000 - 0.25) < 4.5 * math.sqrt(0.25 * 0.75 / 4000)


@pytest.mark.parametrize(
    "server_round, budget, base",
    [(1, 1, 1.5), (7, 1, 1.5), (8, 1, 1.6), (10, 2, 4.0), (3, 3, 1.8)],
)
def test_the_base_of_the_draw(server_round, budget, base, monkeypatch):
    """b(r) = max(1.5, r M / N), N = 5, where r counts from 0: after round 8 comes r = 8, and 8 / 5 = 1.6.

    The probabilities that are drawn from are b^|p_j| / sum_k b^|p_k|, whatever the sign of p.
    """
    asked = []
    draw = torch.multinomial
    monkeypatch.setattr(
        torch,
        "multinomial",
        lambda w, *a, **k: (asked.append(w), draw(w, *a, **k))[1],  # type: ignore[func-returns-value]
    )
    drawing_client([5.0, 1.0, -2.0, 0.0, 0.5], server_round).choose_downloads(
        set("bcde"), budget
    )
    weights = np.array([base**1.0, base**2.0, 1.0, base**0.5])
    assert (asked[0] / asked[0].sum()).tolist() == pytest.approx(
        weights / weights.sum(), rel=1e-9
    )


@pytest.mark.parametrize("server_round, base", [(1, 1.5), (40, 8.0)])
def test_one_download_is_drawn_by_b_to_the_strength(server_round, base):
    """P(j) = b^|p_j| / sum_k b^|p_k|. The next round's r, counted from 0, is this round's number.

    b(r) = max(1.5, r M / N): with M = 1, N = 5, r = 1: 1.5; r = 40: 8. The sign of p does not matter.
    """
    strengths = [5.0, 1.0, -2.0, 0.0, 0.5]
    counts = Counter(draws(drawing_client(strengths, server_round), set("bcde"), 1, 6000))
    weights = {n: base ** abs(p) for n, p in zip("bcde", strengths[1:], strict=True)}
    for name, weight in weights.items():
        p = weight / sum(weights.values())
        assert abs(counts[name,] / 6000 - p) < 4.5 * math.sqrt(p * (1 - p) / 6000)


def test_several_downloads_are_drawn_without_replacement():
    """Two of four, one after the other: P({i, j}) = q_i q_j (1 / (1 - q_i) + 1 / (1 - q_j)); b = 10 2 / 5."""
    strengths = [5.0, 1.0, 0.5, 0.0, 0.25]
    counts = Counter(draws(drawing_client(strengths, 10), set("bcde"), 2, 6000))
    weights = {n: 4.0**p for n, p in zip("bcde", strengths[1:], strict=True)}
    q = {n: w / sum(weights.values()) for n, w in weights.items()}
    assert sum(counts.values()) == 6000
    assert all(len(set(pair)) == 2 for pair in counts)
    for i, j in (("b", "c"), ("b", "d"), ("c", "e"), ("d", "e")):
        p = q[i] * q[j] / (1 - q[i]) + q[j] * q[i] / (1 - q[j])
        assert abs(counts[i, j] / 6000 - p) < 4.5 * math.sqrt(p * (1 - p) / 6000)


def test_a_large_b_does_not_overflow():
    """b^|p| = 60000^90 is beyond every float; the strongest is drawn."""
    assert set(draws(drawing_client([1, 90, 1, 1, 1], 300_000), set("bcde"), 1, 20)) == {("b",)}
