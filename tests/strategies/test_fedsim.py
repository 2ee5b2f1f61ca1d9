"""FedSim, FedAlt, FedPer, FedRep: two silos by hand, every split into parts, the equivalences (B11, B12, B22)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from near import near
from representatives import product
from tiny import SHORT, comparable, federate, initial, rows_of, same, settings_of
from two_layers import DEEP, FC1, FC2, deep_gradient, replies_of, rounds_trained, start_at

from models.flat import gather
from models.initialisation import flat_model
from models.networks.mlp import MlpSettings
from partitions.common.errors import UserError
from strategies.base.client import SiloClient
from strategies.base.partial import personal_blocks, split_parts

METHODS = ("fedsim", "fedper", "fedalt", "fedrep")
OPTIONS = {**DEEP, **SHORT, "momentum": 0.5}
SAME_EPOCHS = {"fedrep__head_epochs": 2, "fedrep__body_epochs": 2}
# fc1 of 16, fc2 of 25, fc3 of 18 scalars
THREE_LAYERS = {**OPTIONS, "mlp__hidden": "4,5"}


# ---- By hand and in numpy --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fedsim", "fedalt"])
def test_two_silos_by_hand(pair, name, monkeypatch):
    """One column, one hidden unit, two classes: w = (s, t; c, -c, d, -d), h = relu(s x + t), z = 2 (c h + d).

    Start s = 1, t = c = d = 0, η = 1, fc2 personal. Heads first, at c = d = 0: the gradient of fc1 is 0, p = 1/2, so
    a (h = 2, class 0): c = 2/2 = 1, d = 1/2; b (h = 1, class 1): c = d = -1/2.
    With these heads, a: z = 2 (2 + 1/2) = 5, q = 1 / (1 + e^5), dL/dh = -2 c q: ds = -4 q, dt = -2 q;
    b: z = -2, r = 1 / (1 + e^2), dL/dh = -r: ds = dt = -r. The mean of fc1 (weights 1/4, 3/4):
    s = 1 + (4 q + 3 r) / 4, t = (2 q + 3 r) / 4.
    FedAlt does both in one round; FedSim the heads in round 1 (fc1 stands still), fc1 in round 2, with one more step of
    the heads on the old fc1: a: c = 1 + 2 q, d = 1/2 + q; b: c = d = -1/2 - r.
    """
    start_at(monkeypatch, [1, 0, 0, 0, 0, 0])
    run = federate(pair, name, mlp__hidden="1", rounds=2 if name == "fedsim" else 1)
    q, r = 1 / (1 + math.exp(5)), 1 / (1 + math.exp(2))
    u = [1 + (4 * q + 3 * r) / 4, (2 * q + 3 * r) / 4]
    near(run.shared, u)
    step = 1 if name == "fedsim" else 0
    a, b = (1 + step * 2 * q, 0.5 + step * q), (-0.5 - step * r, -0.5 - step * r)
    for silo, shared, (c, d) in (("a", (1 + 4 * q, 2 * q), a), ("b", (1 + r, r), b)):
        expected = [*shared, c, -c, d, -d]
        near(run.personal(silo), expected)


@pytest.mark.parametrize(
    "name, personal",
    [
        ("fedsim", "output"),
        ("fedsim", "input"),
        ("fedalt", "output"),
        ("fedalt", "input"),
        ("fedrep", "output"),
    ],
)
def test_rounds_of_several_steps_in_numpy(two, name, personal):
    """Two rounds in float64: momentum per phase, which starts afresh; η falls by 0.9 a round; full batches.

    FedSim: 2 joint steps. FedAlt: 3 steps on v, then 2 on u. FedRep: 4 on the head, then 1 on the body.
    """
    epochs = {
        "fedalt": {"fedalt__personal_epochs": 3},
        "fedrep": {"fedrep__head_epochs": 4},
    }.get(name, {})
    run = federate(
        two,
        name,
        **{f"{name}__personal": personal},
        **epochs,
        **DEEP,
        rounds=2,
        local_epochs=2,
        momentum=0.5,
        lr_decay=0.9,
    )
    shared, own = (FC1, FC2) if personal == "output" else (FC2, FC1)
    whole = slice(0, None)
    phases = {
        "fedsim": [(whole, 2)],
        "fedalt": [(own, 3), (shared, 2)],
        "fedrep": [(own, 4), (shared, 1)],
    }[name]
    w = dict.fromkeys(two, run.start())
    u = w["a"][shared]
    for server_round in range(2):
        total = np.zeros_like(u)
        for silo, file in two.items():
            x, y = rows_of(file)
            local = w[silo].copy()
            local[shared] = u
            for part, steps in phases:
                velocity = np.zeros_like(local[part])
                for _ in range(steps):
                    velocity = 0.5 * velocity + deep_gradient(local, x, y)[part]
                    local[part] -= 0.3 * 0.9**server_round * velocity
            w[silo] = local
            total += len(y) / 16 * local[shared]
        u = total
    run.ends_near(u, w, 1e-5)


# ---- Equivalences ----------------------------------------------------------------------------------------------------


@product(name=METHODS, which=[("fc2", 8), ("fc1, norm", 0), ("norm", 0), ("none", 8)])
def test_the_statistics_of_personal_blocks_stay(three, name, which, tiny_bn):
    """tiny-bn's 8 running statistics belong to the block norm, and travel where it is shared."""
    personal, travel = which
    options = {**OPTIONS, "rounds": 2, "model": "tiny-bn"}
    run = federate(three, name, **{f"{name}__personal": personal}, **SAME_EPOCHS, **options)
    for silo in three:
        for _, _, payload, _ in replies_of(run, silo):
            sent = payload.models.get("buffers")
            assert (0 if sent is None else len(sent.vector)) == travel
        assert ("buffers" in run.sent_to(silo, 2)) == (travel > 0)
    own = [run.kept(silo)["personal.buffers"] for silo in three]
    assert not same(own[0], own[1])


@pytest.mark.parametrize(
    "settings, names",
    [
        ({"personal": "output"}, "fc3"),
        ({"personal": "output", "layers": 2}, "fc2,fc3"),
        ({"personal": "input"}, "fc1"),
        ({"personal": "input", "layers": 2}, " fc2 , fc1"),
    ],
)
@pytest.mark.parametrize("name", ["fedsim", "fedalt"])
def test_blocks_by_place_are_blocks_by_name(three, name, settings, names):
    place = {f"{name}__{key}": value for key, value in settings.items()}
    runs = [
        federate(three, name, **s, **THREE_LAYERS)
        for s in (place, {f"{name}__personal": names})
    ]
    assert comparable(runs[0].rows) == comparable(runs[1].rows)


@product(personal=["output", "input", "fc2", "fc1,fc3"], name=METHODS)
def test_only_the_shared_blocks_travel(three, name, personal):
    """Any set of blocks: what comes and goes is u, neighbours or not; v stays where it was made.

    Offsets of three columns, hidden layers of 4 and 5, three classes: fc1 0..16, fc2 16..41, fc3 41..59.
    """
    run = federate(three, name, **{f"{name}__personal": personal}, **THREE_LAYERS)
    shared = {
        "output": [slice(0, 41)],
        "input": [slice(16, 59)],
        "fc2": [slice(0, 16), slice(41, 59)],
        "fc1,fc3": [slice(16, 41)],
    }[personal]
    size = sum(p.stop - p.start for p in shared)
    assert run.values("bytes_up")[:3] == [3 * 4 * size] * 3
    assert run.values("bytes_down") == [3 * 4 * size] * 4
    for server_round, silo, payload, _ in replies_of(run):
        assert list(payload.models) == ["shared"]
        assert not payload.numbers
        if server_round == 3:
            assert same(payload.models["shared"].vector, gather(run.personal(silo), shared))
    own = [run.personal(silo).clone() for silo in three]
    for vector in own:
        for part in shared:
            vector[part] = 0
    assert not any(same(own[i], own[j]) for i, j in ((0, 1), (0, 2), (1, 2)))


@pytest.mark.parametrize("name", ["fedper", "fedrep"])
def test_reported_is_the_averaged_body_with_the_own_head(three, name):
    """FedPer and FedRep are compared by what a silo has before local training, not by its body of one silo's epochs."""
    run = federate(three, name, **OPTIONS)
    body = run.shared.double().numpy()
    for silo, file in three.items():
        x, y = rows_of(file)
        head = run.personal(silo).double().numpy()[FC2]
        hidden = np.maximum(x @ body[:12].reshape(4, 3).T + body[12:], 0)
        logits = hidden @ head[:12].reshape(3, 4).T + head[12:]
        loss = (np.log(np.exp(logits).sum(1)) - logits[np.arange(len(y)), y]).mean()
        assert run.values("loss", silo, run.strategy.info.reports)[-1] == pytest.approx(
            loss, rel=1e-4
        )


# ---- The order of the steps ------------------------------------------------------------------------------------------


def test_fedalt_evaluates_twice_as_many_gradients(three, monkeypatch):
    counts = {}
    compute = SiloClient.gradient

    for name in ("fedsim", "fedalt"):
        counts[name] = 0

        def counted(self, x, y, name=name):
            counts[name] += 1
            return compute(self, x, y)

        monkeypatch.setattr(SiloClient, "gradient", counted)
        federate(three, name, **OPTIONS)
    # Batches of 4 of 6, 10 and 8 rows: 2 + 3 + 2, times 2 epochs and 3 rounds.
    assert counts == {"fedsim": 42, "fedalt": 84}


def test_one_part_stands_still_while_the_other_is_trained(three, monkeypatch):
    """FedRep: 4 head epochs that leave the body as received, then 3 body epochs that leave the new head."""
    seen = []
    compute = SiloClient.gradient

    def recorded(self, x, y):
        seen.append(self.model.vector.clone())
        return compute(self, x, y)

    monkeypatch.setattr(SiloClient, "gradient", recorded)
    run = federate(
        three, "fedrep", fedrep__head_epochs=4, fedrep__body_epochs=3, **DEEP, rounds=1
    )
    start, steps = initial(run.settings, 3, 3), 4 + 3
    for i, silo in enumerate(three):
        head, body = seen[steps * i : steps * i + 4], seen[steps * i + 4 : steps * (i + 1)]
        assert all(same(w[FC1], start[FC1]) for w in [*head, body[0]])
        assert all(same(w[FC2], run.personal(silo)[FC2]) for w in body)
        assert len({tuple(w[FC2].tolist()) for w in [*head, body[0]]}) == 5
        assert len({tuple(w[FC1].tolist()) for w in body}) == 3


# ---- Absent silos, faults --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_an_absent_silo_keeps_its_personal_part(three, name):
    """One of three silos a round: u is then that silo's, whole, and every head waits where its silo left it."""
    run = federate(three, name, **{**OPTIONS, "rounds": 5}, participation=0.5)
    trained = {silo: rounds_trained(run, silo) for silo in three}
    assert sorted(r for rounds in trained.values() for r in rounds) == [1, 2, 3, 4, 5]
    assert max(len(rounds) for rounds in trained.values()) > 1
    last = next(silo for silo, rounds in trained.items() if 5 in rounds)
    assert same(run.shared, run.personal(last)[FC1])
    for silo, rounds in trained.items():
        if rounds:  # the model it keeps is that of its last round
            *_, (_, _, payload, _) = replies_of(run, silo)
            assert same(payload.models["shared"].vector, run.personal(silo)[FC1])
        heads = {
            r.value
            for r in run.rows
            if (r.silo, r.snapshot, r.metric) == (silo, "personal", "loss")
            and r.split == "test"
            and r.round >= max(rounds, default=1)
        }
        assert len(heads) == 1


def test_unknown_blocks_are_refused(three):
    with pytest.raises(UserError, match=r"personal = 'fc1,head'.*fc1, fc2"):
        federate(three, "fedsim", fedsim__personal="fc1,head", **OPTIONS)


def test_parts_cover_the_vector_once():
    """Whatever is personal, the shared and the personal parts make up the vector without overlap."""
    layout = flat_model("mlp", (3,), 3, MlpSettings("4,5"), "cpu").layout
    for personal in ("all", "none", "output", "input", "fc2", "fc3,fc1", ""):
        settings = settings_of({}, strategy="fedsim", fedsim__personal=personal, silos=1).method
        parts = split_parts(layout, personal_blocks(layout, settings))
        covered = sorted(
            i for part in (*parts[0], *parts[1]) for i in range(part.start, part.stop)
        )
        assert covered == list(range(59))


@pytest.mark.parametrize("changes", [{}, {"fedper__layers": 9}, {"fedper__personal": "input"}])
def test_a_network_of_which_nothing_would_be_shared_is_refused(two, changes):
    """Once, before round 1; FedPer on it would be Local without a word."""
    with pytest.raises(
        UserError,
        match=r"this network has the layer blocks fc1 alone, so nothing would be shared",
    ):
        federate(two, "fedper", model="linear", rounds=1, **changes)
    federate(two, "fedper", model="linear", rounds=1, fedper__personal="all")
