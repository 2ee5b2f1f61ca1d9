"""Secure sums without masks: which methods and settings they fit, the numbers of a sum, silos that are absent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from cases import CASES, OPTIONS, typical
from failing import fails
from hypothesis import given
from hypothesis import strategies as st
from near import near
from representatives import sampled
from secured import received_by
from taken import silofl
from tiny import federate, random_silos, same, settings_of, train_replies
from torch.testing import assert_close
from two_layers import DEEP

from partitions.common.errors import RunFailedError, UserError
from partitions.common.settings import keys_of
from strategies import strategies
from strategies.base.aggregation.secure import add_integers, integers_of, scale, weights_of
from strategies.base.settings import RULES, Common
from strategies.base.state import BUFFERS
from strategies.base.transport.payload import array_record, tensor_of
from strategies.fedavg import FedAvg

SUMS = [name for name, method in strategies().items() if method.info.aggregation.sums]
SECURE = {"secure_aggregation": True}
# With a setting that sums need another value of
OWN_NUMBER = {"feddyn, as its code": "weights", "fedapm, input, accuracy": "alpha"}
CALLED = [
    name
    for name, (settings, _, _) in CASES.items()
    if settings["strategy"] in SUMS and name not in {*OWN_NUMBER, "fedlp, tensors"}
]
NEEDED: Mapping[str, Mapping[str, Any]] = {
    "fedlp": {"fedlp.keep": 1.0},
    "floco": {"floco.tau": 0},
    "player-fl": {"player-fl.combine": "mean"},
    "player-fl-random": {"player-fl-random.combine": "mean"},
}


def called(name, **changes):
    """Settings of a case, with those that sums need."""
    return {**CASES[name][0], **DEEP, **OPTIONS, **NEEDED.get(name, {}), **changes}


@pytest.fixture
def whole(tmp_path):
    """Three silos that have samples of all three classes, which FedProto needs."""
    return random_silos(tmp_path, [6, 10, 8], seed=16)


@pytest.mark.parametrize("name", sorted(strategies().keys() - {*SUMS}))
def test_another_method_is_refused_with_its_reason(three, name):
    said = fails(UserError, None, settings_of, three, strategy=name, **SECURE)
    reason = strategies()[name].info.aggregation.sums
    assert said == f"secure-aggregation = true: not with {name}: {reason}"
    assert "does not declare" not in str(reason)


@typical(CALLED)
def test_the_sum_is_the_mean(whole, name, tiny_bn):
    """What a method's server makes of one mean is what it makes of single updates, up to the rounding."""
    rounds = called(name, rounds=3)
    plain = federate(whole, **rounds, robust="none")
    summed = federate(whole, **rounds, **SECURE)
    kept = {key for key in plain.held if not key.startswith("z.")}  # FedAPM's
    assert summed.held.keys() == kept
    for key, vector in summed.held.items():
        assert_close(plain.held[key], vector, rtol=1e-5, atol=1e-5)
    assert plain.strategy.state.numbers == summed.strategy.state.numbers
    for silo in whole:
        assert_close(summed.personal(silo), plain.personal(silo), rtol=1e-5, atol=1e-5)
    also = summed.strategy.info.summed_also
    assert bool(also) == (summed.values("bytes_up") != plain.values("bytes_up"))


@typical(CALLED)
def test_all_silos_of_a_round_receive_the_same(whole, name, tiny_bn):
    """Masks cancel only then: a number for one silo could make its step the only one."""
    run = federate(whole, **called(name, rounds=3), **SECURE)
    received: dict[Any, set[str]] = {}
    for message, _ in run.grid.traffic:
        if message.metadata.message_type == "train":
            found = received_by(message)
            received.setdefault(message.content["config"]["round"], set()).add(found)
    assert [len(of) for of in received.values()] == [1, 1, 1]


@pytest.mark.parametrize("name, key", OWN_NUMBER.items())
def test_a_number_for_each_silo_is_refused(three, name, key):
    settings = CASES[name][0]
    line = rf"^{settings['strategy']}.{key} = samples: .*a number of its own"
    fails(UserError, line, settings_of, three, **{**settings, **SECURE})


def test_nothing_but_integers_leaves(three, tiny_bn):
    run = federate(three, "fedavg", model="tiny-bn", rounds=2, **SECURE)
    size = run.strategy.layout.size + run.strategy.layout.buffer_size
    for _, reply in train_replies(run.grid):
        assert set(reply.content) == {"config", "metrics", "masked"}
        array = reply.content.array_records["masked"]["sum"]
        assert array.dtype == "uint32" and tuple(array.shape) == (size,)


@pytest.mark.parametrize("absent", ["a", "b"])
def test_batch_norm_statistics_and_an_absent_silo(three, absent, tiny_bn):
    """The mean is over the silos that answered, of all vectors; no variance is below 0."""

    def go(**changes):
        def prepare(grid):
            grid.absent = {(absent, 2)}

        return federate(three, "fedavg", model="tiny-bn", rounds=3, prepare=prepare, **changes)

    plain, summed = go(robust="none"), go(**SECURE)
    for key in ("global", BUFFERS):
        near(summed.held[key], plain.held[key], 1e-5)
    assert summed.strategy.state.counted == plain.strategy.state.counted


def test_a_share_is_by_samples_at_most_half(tmp_path, caplog):
    """And at most weight-cap, or 5, times the median. The note of a run named the weight of a run without sums."""
    files = random_silos(tmp_path, [4, 4, 40, 5])
    for cap, largest in ((5.0, 13), (2.0, 8), (0.0, 13)):
        run = federate(files, "fedavg", rounds=1, weight_cap=cap, **SECURE)
        weights = weights_of(run.strategy, files)
        assert weights == {"a": 4, "b": 4, "c": largest, "d": 5}, cap
        assert (
            f"c's 40 training samples count as {largest}, so that no hospital outweighs the others: "
            "its share of a sum" in caplog.text
        )
        caplog.clear()
        shares = {
            run.grid.key_of(message)[0]: message.content.config_records["config"][
                "secure_share"
            ]
            for message, _ in run.grid.traffic
            if message.metadata.message_type == "train"
        }
        assert shares == {silo: w / sum(weights.values()) for silo, w in weights.items()}


REFUSED = (
    ({"wire_dtype": "float16"}, "wire-dtype = float16: with secure-aggregation = true it must be float32"),
    ({"wire_dtype": "int8"}, "wire-dtype = int8: with secure-aggregation = true it must be float32"),
    ({"wire_sparse": True}, "wire-sparse = true: with secure-aggregation = true it must be false"),
    ({"participation": 0.7}, "participation = 0.7: with secure-aggregation = true it must be 1.0"),
    ({"late_joiners": "any"}, "late-joiners = any: with secure-aggregation = true it must be empty"),
    ({"keep_models": "reported"}, "keep-models = reported: with secure-aggregation = true it must be none"),
    ({"checkpoint_every": 2}, "checkpoint-every = 2: with secure-aggregation = true it must be 1"),
    *(
        ({"robust": rule, "robust_attackers": 0}, f"robust = {rule}: with secure-aggregation = true no silo")
        for rule in RULES
    ),
    ({"silos": 2}, "silos = 2: secure-aggregation = true needs at least 3 that train, here are 2"),
    ({"hold_out": "c"}, "silos = 3: secure-aggregation = true needs at least 3 that train, here are 2"),
    ({"strategy": "scaffold", "scaffold__up": "model"}, "scaffold.up = model: with secure-aggregation = true it must"),
    ({"strategy": "fedlp"}, "fedlp.keep = 0.7: with secure-aggregation = true it must be 1.0: below, each layer is of"),
    ({"strategy": "player-fl"}, "player-fl.combine = median: with secure-aggregation = true it must be mean: a median"),
)  # fmt: skip


@pytest.mark.parametrize("changes, line", REFUSED, ids=lambda value: str(value)[:40])
def test_a_setting_that_does_not_fit_is_refused(three, changes, line):
    settings_of(three, **{k: v for k, v in changes.items() if k != "silos"} | {"silos": 3})
    said = fails(
        UserError, None, settings_of, three, **{"strategy": "fedavg", **SECURE, **changes}
    )
    assert said.startswith(line)


def test_a_length_without_secure_sums_is_refused(three):
    with pytest.raises(
        UserError, match=r"^secure-clip = 3: it needs secure-aggregation = true$"
    ):
        settings_of(three, secure_clip=3)


# Another value of each common setting; those that say where data and results are, and how many silos, have none.
OTHER = {
    "rounds": 2, "seed": 8, "threads": 1, "local-epochs": 2, "batch-size": 4, "min-batch-size": 2, "momentum": 0.5,
    "learning-rate": 0.1, "weight-decay": 0.01, "lr-decay": 0.9, "focal-gamma": 2.0, "hold-out": "e",
    "hold-out-epochs": 1, "late-joiners": "any", "wire-topk": 0.5, "evaluate-every": 2, "patience": 1, "min-delta": 0.1,
    "participation": 0.5, "min-silos": 3, "weight-cap": 2.0, "round-timeout": 60.0, "straggler-factor": 2.0,
    "straggler-floor": 1.0, "robust-clip": 2.0, "robust-attackers": 0, "min-metric-samples": 2, "checkpoint-every": 2,
    "trainable": "head", "lora-rank": 2, "lora-alpha": 4.0, "validation": 0.1, "secure-clip": 2.0,
    "secure-group": 2, "block-rates": "fc1=0.5",
}  # fmt: skip
WITHOUT = {
    "strategy", "device", "model", "init-weights", "dataset", "data-dir", "task", "partition", "silos", "augment",
    "agreed", "study", "resume", "out", "secure-aggregation", "evidence-horizon", "patch", "patches-per-volume",
    "foreground-share", "trainer",
    "secure-robust",  # needs nine silos: tests/server/run/test_secure_robust.py
}  # fmt: skip


@sampled("key", sorted(keys_of(Common).keys() - WITHOUT), 6)
def test_every_setting_runs_or_is_refused(tmp_path, key):
    files = random_silos(tmp_path, [6, 11, 8, 9, 7])
    field = keys_of(Common)[key]
    others = [v for v in field.metadata.get("choices", ()) if v != field.default]
    if type(field.default) is bool:
        others = [not field.default]
    elif type(field.default) is not str:
        others = [OTHER.get(key, field.default + 1 if type(field.default) is int else 0.5)]
    with_it = {"min-delta": {"patience": 1}, "lora-alpha": {"lora_rank": 2}}
    for value in others or [OTHER[key]]:
        changes = {"rounds": 2, **with_it.get(key, {}), key.replace("-", "_"): value}
        try:
            settings_of(files, **DEEP | SECURE | changes)
        except UserError as error:
            assert str(error).startswith(f"{key} = ") and "secure-aggregation" in str(error), (
                error
            )
            settings_of(files, **DEEP | changes)
            continue
        run = federate(files, state_dir=tmp_path / "state", **DEEP | SECURE | changes)
        assert torch.isfinite(run.strategy.state.model).all()


# ---- Numbers -------------------------------------------------------------------------------------------------------


def encoded(step, share, silos, clip):
    config = {"secure_share": share, "participants": silos}
    common = Common(secure_aggregation=True, secure_clip=clip)
    return integers_of(FedAvg.info, common, {"model": step}, {}, config)[0]


@given(
    st.integers(3, 100), st.integers(0, 2**32 - 1), st.sampled_from([1e-3, 1.0, 4096.0]), st.booleans()
)  # fmt: skip
def test_the_error_of_a_sum(silos, seed, clip, longer):
    """At most N C 2^-32 against float64, and it never wraps: also where all steps are of length C in one direction."""
    rng = np.random.default_rng(seed)
    steps = rng.normal(size=(silos, 5)) * (0 if longer else clip / 3)
    if longer:
        steps[:, 2] = -3 * clip
    weights = rng.integers(1, 1000, silos)
    shares = weights / weights.sum()
    exact, integers = np.zeros(5), []
    for step, share in zip(steps, shares.tolist(), strict=True):
        vector = torch.tensor(step, dtype=torch.float32)
        integers.append(encoded(vector, share, silos, clip))
        length = float(np.linalg.norm(vector.double().numpy()))
        exact += share * vector.double().numpy() * min(1, clip / max(length, 1e-300))
    total = add_integers(integers).double().numpy() / scale(silos, clip)
    assert np.abs(total - exact).max() <= 1.0001 * silos * clip * 2**-32


def test_the_order_of_a_sum_does_not_matter(three):
    vectors = [torch.randint(-(2**31), 2**31, (50,), dtype=torch.int32) for _ in range(5)]
    whole = sum(v.long() for v in vectors)
    wrapped = (np.asarray(whole) & 0xFFFFFFFF).astype(np.uint32).view(np.int32)
    assert same(add_integers(vectors), torch.from_numpy(wrapped))
    assert same(add_integers(vectors), add_integers(vectors[::-1]))


@pytest.mark.parametrize(
    "config",
    [{}, {"secure_share": 1.0, "participants": 3}, {"secure_share": 0.0, "participants": 3},
     {"secure_share": 0.5, "participants": 2}, {"secure_share": 2, "participants": 3},
     {"secure_share": float("nan"), "participants": 3}],
)  # fmt: skip
def test_a_share_with_which_a_sum_wraps_is_refused(config):
    common = Common(secure_aggregation=True)
    with pytest.raises(UserError, match=r"^the message's share [^\n]* is not between 0 and 1"):
        integers_of(FedAvg.info, common, {"model": torch.ones(2)}, {}, config)


# ---- Nonsense ------------------------------------------------------------------------------------------------------


def spoiled(rounds, change):
    """For ``prepare``: what ``b`` sends in these rounds is changed on its way."""

    def prepare(grid):
        def after(silo, message, reply):
            trains = message.metadata.message_type == "train"
            if trains and silo == "b" and grid.key_of(message)[1] in rounds:
                changed = change(reply.content.pop("masked"))
                if changed is not None:
                    reply.content["masked"] = changed
            return reply

        grid.after = after

    return prepare


def noise(record):
    size = len(tensor_of(record["sum"]))
    integers = torch.randint(-(2**31), 2**31, (size,), dtype=torch.int32)
    return array_record({"sum": integers.view(torch.uint32)})


def test_an_impossible_sum_changes_no_model(three):
    plain = federate(three, "scaffold", rounds=1, **SECURE)
    run = federate(three, "scaffold", rounds=3, prepare=spoiled({2, 3}, noise), **SECURE)  # fmt: skip
    assert same(run.strategy.state.model, plain.strategy.state.model)
    assert set(run.strategy.state.counted.values()) == {1}


def test_the_third_impossible_sum_in_a_row_ends_the_run(three):
    federate(three, "fedavg", rounds=5, prepare=spoiled({1, 2, 4, 5}, noise), **SECURE)
    with pytest.raises(RunFailedError, match=r"^round 4: .* this is the round number 3 in a row$"):  # fmt: skip
        federate(three, "fedavg", rounds=6, prepare=spoiled({2, 3, 4}, noise), **SECURE)  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        lambda record: None,
        lambda record: array_record({"sum": torch.zeros(12)}),
        lambda record: array_record({"sum": tensor_of(record["sum"])[:5]}),
        lambda record: array_record({"other": tensor_of(record["sum"])}),
        lambda record: array_record({"sum": tensor_of(record["sum"]), "other": torch.zeros(1)}),
    ],
)
def test_what_is_no_vector_of_integers_is_left_out(three, change):
    run = federate(three, "fedavg", rounds=2, prepare=spoiled({2}, change), **SECURE)
    assert run.strategy.state.counted == {"a": 2, "b": 1, "c": 2}


def test_single_updates_are_refused_in_a_run_of_sums(three):
    """A silo that sends its vector as well is left out as a whole."""

    def prepare(grid):
        def after(silo, message, reply):
            if silo == "b" and message.metadata.message_type == "train":
                reply.content["model.model"] = array_record({"vector": torch.zeros(12)})
            return reply

        grid.after = after

    run = federate(three, "fedavg", rounds=1, prepare=prepare, **SECURE)
    assert set(run.strategy.state.counted) == {"a", "c"}


def test_a_cut_step_bounds_a_silo(three):
    """Of length C times the share, in the direction that was sent."""
    run = federate(three, "fedavg", rounds=1, secure_clip=1e-3, learning_rate=9.0, **SECURE)  # fmt: skip
    moved = run.strategy.state.model - run.strategy.initial("")
    assert 0 < float(moved.norm()) <= 1.001e-3


def test_sums_make_no_epsilon_smaller(three, tmp_path):
    """A silo's noise protects it alone: what others add came after it, and is not counted (docs/privacy.md)."""
    options = {**DEEP, "rounds": 2, "batch_size": 4, "dp": True}
    options |= {"dp__noise_multiplier": 1.0, "dp__clip_norm": 1.0}
    spent = []
    for secure in (False, True):
        options |= {"secure_aggregation": secure, "directory": tmp_path / f"run {secure}"}
        run = federate(three, "fedavg", state_dir=tmp_path / str(secure), **options)
        spent.append([(r.round, r.silo, r.value) for r in run.rows if r.metric == "epsilon"])
    assert spent[0] == spent[1] and len(spent[0]) == 6


def test_strategies_as_json(capsys):
    assert silofl("strategies", "--json") == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["fedavg"]["sums"] is True and rows["fedavg"]["not_sums"] == ""
    assert rows["apple"]["sums"] is False and "own model" in rows["apple"]["not_sums"]
