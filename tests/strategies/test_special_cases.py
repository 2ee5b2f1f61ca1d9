"""Special cases of the methods, bit for bit: with some settings a method is another one.

A row has both methods, each with its own settings, and what both have besides. More of them, which need more than
settings, stand beside the method's derivations.
"""

from __future__ import annotations

import pytest
from near import near
from representatives import seldom
from tiny import Run, comparable, federate, initial, keep_weights_at, random_silos, same
from two_layers import DEEP, assert_received_is_fedavgs, snapshot_rows

OPTIONS = {**DEEP, "rounds": 3, "local_epochs": 2, "batch_size": 4, "momentum": 0.5}
BYTES = ("round_seconds", "bytes_down", "bytes_up")
EQUAL_EPOCHS = {"fedrep__head_epochs": 2, "fedrep__body_epochs": 2}
WIDE = {"mlp__hidden": "4,5"}
BN = {"model": "tiny-bn", "learning_rate": 0.1}
ONE_STEP = {"local_epochs": 1, "batch_size": 1000}
ALA = {"fedala__max_epochs": 3, "fedala__eta": 0.5}
FOUR_METHODS = ("fedsim", "fedper", "fedalt", "fedrep")
DUALS = {"learning_rate": 0.6, "fedapm__sigma": 0.0}
FREE = {**DUALS, "fedapm__rho": 0.0, "fedapm__v_start": "server"}

# Every metric and byte, the server's vectors and the silos' models.
SAME = [
    ("fedavg", {"ala": True}, "fedala", {}, ALA),
    *(("apple", {"apple__max_downloads": n}, "apple", {}, {}) for n in (2, 5)),
    ("fedala", {"fedala__layers": 0}, "fedavg", {}, {}),
    ("fedas", {"fedas__align_epochs": 0, "fedas__weights": "samples"}, "fedper", {}, {}),
    ("fedavg-ft", {"fedavg-ft__epochs": 2}, "fedavg", {}, {"lr_decay": 0.9}),
    (
        "fedbabu",
        {"fedbabu__layers": 0, "fedbabu__epochs": 3},
        "fedavg-ft",
        {"fedavg-ft__epochs": 3},
        {},
    ),
    *(("fedfomo", {"fedfomo__max_downloads": n}, "fedfomo", {}, {}) for n in (2, 9)),
    *(("fedlama", {"fedlama__phi": 1}, "fedavg", {}, both) for both in ({}, BN)),
    *(
        ("fedlama", {"fedlama__phi": 3, "fedlama__wait": 4}, "fedavg", {}, both)
        for both in ({}, BN)
    ),
    *(
        (
            "fedlp",
            {"fedlp__keep": 1.0, "fedlp__weights": "samples", "fedlp__unit": unit},
            "fedavg",
            {},
            {},
        )
        for unit in ("layer", "tensor")
    ),
    ("fedavgm", {"fedavgm__momentum": 0.0}, "fedavg", {}, {}),
    ("fedphp", {"fedphp__lambda": 0.0, "fedphp__mu": 0.0}, "fedavg", {}, {}),
    ("fedprox", {"fedprox__mu": 0.0}, "fedavg", {}, {}),
    *(("fedprox", {"fedprox__mu": mu}, "fedavg", {}, ONE_STEP) for mu in (0.001, 1.0, 100.0)),
    (
        "fedprox-ft",
        {"fedprox-ft__mu": 0.0, "fedprox-ft__epochs": 2},
        "fedavg-ft",
        {"fedavg-ft__epochs": 2},
        {},
    ),
    *(
        (name, own, "fedavg", {}, EQUAL_EPOCHS)
        for name in FOUR_METHODS
        for own in ({f"{name}__personal": "none"}, {f"{name}__layers": 0})
    ),
    *(
        (name, {f"{name}__personal": personal}, "local", {}, {**EQUAL_EPOCHS, **both})
        for name in FOUR_METHODS
        for personal, both in (("all", {}), ("fc2, fc1", {}), ("all", BN))
    ),
    *(
        (one, {f"{one}__layers": n}, other, {f"{other}__layers": n}, EQUAL_EPOCHS | WIDE)
        for one, other in (("fedsim", "fedper"), ("fedalt", "fedrep"))
        for n in (1, 2)
    ),
    *(("partialfed", {"partialfed__personal": "none"}, "fedavg", {}, b) for b in ({}, BN)),
    (
        "pfedme",
        {"optimizer": "adam", "momentum": 0.9, "weight_decay": 0.1},
        "pfedme",
        {},
        {"learning_rate": 0.1},
    ),
    *(
        ("player-fl", own, "fedavg", {}, both)
        for own, both in (
            ({"player-fl__threshold": 1e9}, {}),
            ({"player-fl__threshold": 1e9}, {"mlp__dropout": 0.5}),
            ({"player-fl__threshold": 1e9, "player-fl__batches": 1}, {"mlp__dropout": 0.5}),
            ({"player-fl__threshold": 1e9}, BN),
            ({"player-fl__cut": 2}, {}),
            ({"player-fl__cut": 9}, {}),
        )
    ),
    *(
        ("fedapm", {"fedapm__accuracy": 1e-30}, "fedapm", {}, {"optimizer": optimizer})
        for optimizer in ("sgd", "adam")
    ),
]
# All of it but the bytes and what the server holds: models travel that nobody uses.
BUT_BYTES = [
    (
        "apple",
        {
            "apple__initial_dr": "own",
            "apple__dr_learning_rate": 0.0,
            "apple__common_init": True,
        },
        "local",
        {},
        {"weight_decay": 0.01, "lr_decay": 0.9},
    ),
    (
        "diversifed",
        {"diversifed__lambda": 0.0},
        "local",
        {},
        {"optimizer": "adam", "learning_rate": 0.01},
    ),
    (
        "fedala",
        {"fedala__eta": 0.0, "fedala__layers": 9, "prepare": keep_weights_at(0.0, 31)},
        "local",
        {},
        {},
    ),
    *(
        (name, {f"{name}__lambda": 0.0, f"{name}__start": "own"}, "local", {}, {})
        for name in ("fedamp", "heurfedamp", "diversifed")
    ),
    *(
        (
            "lg-fedavg",
            {"lg-fedavg__layers": layers},
            "fedsim",
            {"fedsim__personal": "input", "fedsim__layers": below},
            both,
        )
        for layers, below, both in ((1, 1, {}), (1, 2, WIDE), (2, 1, WIDE))
    ),
    ("fedcac", {"fedcac__tau": 0.0}, "fedavg", {}, {}),
    ("fedproto", {"fedproto__lambda": 0.0, "fedproto__predict": "head"}, "local", {}, {}),
    ("floco", {"floco__corners": 1, "floco__tau": 2, "floco__rho": 0.0}, "fedavg", {}, {}),
    (
        "lp-proj",
        {"lp-proj__lambda": 0.0},
        "local",
        {},
        {"optimizer_state": "keep", "weight_decay": 0.01},
    ),
    # Nobody looks at the mean, so the silos' steps from it are of any length: nothing is bounded
    *(
        ("partialfed", {"partialfed__personal": "all", "robust": "none"}, "local", {}, both)
        for both in ({}, BN)
    ),
    *(
        (
            "partialfed",
            {"partialfed__personal": part},
            "fedsim",
            {"fedsim__personal": part},
            both,
        )
        for part in ("output", "input", "fc2")
        for both in ({}, BN)
    ),
]
# What the silos receive, and the server's model: fine-tuning leaves the federated training as it is.
RECEIVED = [
    *(
        ("fedavg-ft", {"fedavg-ft__epochs": epochs}, "fedavg", {}, {"momentum": 0.9})
        for epochs in (0, 1, 3)
    ),
    *(
        (
            "fedprox-ft",
            {"fedprox-ft__mu": 0.5, "fedprox-ft__epochs": epochs},
            "fedprox",
            {"fedprox__mu": 0.5},
            {},
        )
        for epochs in (0, 2)
    ),
    ("fedphp", {"fedphp__lambda": 0.0, "fedphp__mu": 0.9}, "fedavg", {}, {}),
    ("fedem", {"fedem__components": 1}, "fedavg", {}, {}),
]
# The silos' own models and their metrics.
PERSONAL = [
    *(
        ("ditto", {"ditto__lambda": 0.0}, "local", {}, both)
        for both in ({}, {"mlp__dropout": 0.5}, {"optimizer": "adam", "learning_rate": 0.01})
    ),
    ("diversifed", {"diversifed__lambda": 100.0}, "local", {}, {"rounds": 1}),
    (
        "fedprox-ft",
        {"fedprox-ft__mu": 0.5, "fedprox-ft__epochs": 2},
        "fedavg-ft",
        {"fedavg-ft__epochs": 2},
        {"rounds": 1},
    ),
]

ADAM = {"optimizer": "adam", "optimizer_state": "keep", "learning_rate": 0.01}
# What the silos receive, the server's model, and the bytes: what is trained besides does nothing to it.
TRAVELS = [
    *(
        ("apfl", own)
        for own in (
            {},
            {"apfl__alpha": 1.0, "apfl__adapt": "batch"},
            {"apfl__mix": "logits"},
            {"participation": 0.7},
            ADAM,
        )
    ),
    *(
        ("ditto", own)
        for own in (
            {},
            {"ditto__lambda": 3.0},
            {"ditto__lambda": 0.0, "ditto__personal_epochs": 5},
            {"mlp__dropout": 0.5},
            {"participation": 0.7},
            ADAM,
        )
    ),
    ("fedlc", {"fedlc__tau": 0.0}),
    ("fedntd", {"fedntd__beta": 0.0}),
    ("ifca", {"ifca__clusters": 1}),
    ("knn-per", {}),
    ("moon", {"moon__mu": 0.0}),
]
# With one silo it is Local.
ALONE = [("fedbn", BN), ("fedcac", {}), ("fedsa-lora", {"lora_rank": 2}), ("lg-mix", {})]


def assert_models_are_same(run, plain):
    for silo in map(run.grid.name_of, run.grid.contexts):
        for array in ("personal", "personal.buffers"):
            own, other = (r.kept(silo).get(array) for r in (run, plain))
            # Behind the network's numbers a method may keep some of its own
            assert own is other or same(own[: len(other)], other)


def name_of(case):
    return f"{case[0]} as {case[2]}"


def cases(every):
    """A test for each case, of which the first of each method is run often."""
    first = {case[0]: case for case in reversed(every)}
    marked = [case if first[case[0]] is case else seldom(case) for case in every]
    return pytest.mark.parametrize("case", marked, ids=name_of)


# Runs that several cases are compared with, by method, silos and settings: those of FedAvg and Local above all
PLAIN: dict[str, Run] = {}


def both_of(files, method, own, other, others, both):
    plain = {**OPTIONS, **both, **others}
    key = f"{other} of {[*files]} with {sorted(plain.items())}"
    PLAIN[key] = PLAIN.get(key) or federate(files, other, **plain)
    return federate(files, method, **{**OPTIONS, **both, **own}), PLAIN[key]


@cases(SAME)
def test_it_is_the_other_method(three, case, tiny_bn):
    run, plain = both_of(three, *case)
    assert comparable(run.rows) == comparable(plain.rows)
    assert_models_are_same(run, plain)
    for name, array in plain.held.items():
        assert same(run.held[name], array)


@cases(BUT_BYTES)
def test_only_what_travels_differs(three, case, tiny_bn):
    run, plain = both_of(three, *case)
    assert comparable(run.rows, without=BYTES) == comparable(plain.rows, without=BYTES)
    assert_models_are_same(run, plain)


@pytest.mark.parametrize("case", RECEIVED, ids=name_of)
def test_what_silos_receive_is_the_others(three, case):
    run, plain = both_of(three, *case)
    assert snapshot_rows(run, "received") == snapshot_rows(plain, "received")
    assert same(run.shared, plain.shared)


@pytest.mark.parametrize("case", PERSONAL, ids=name_of)
def test_silos_end_with_the_others_models(three, case):
    run, plain = both_of(three, *case)
    assert snapshot_rows(run, "personal") == snapshot_rows(plain, "personal")
    assert_models_are_same(run, plain)


@pytest.mark.parametrize(
    "case",
    [
        *(
            (
                "fedapm",
                {**FREE, "fedapm__personal": part},
                "fedalt",
                {"fedalt__personal": part},
                {},
            )
            for part in ("output", "input", "none")
        ),
        ("fedapm", {**DUALS, "fedapm__personal": "all"}, "local", {}, {}),
        ("fedlp", {"fedlp__keep": 1.0}, "fedavg", {}, {}),
    ],
    ids=name_of,
)
def test_with_silos_of_one_size_it_is_the_other_method(tmp_path, case):
    """Means of two silos are exact: α = 1/2 of FedAPM, whose learning rate is so many times larger."""
    test_it_is_the_other_method(random_silos(tmp_path, [8, 8]), case, None)


@pytest.mark.parametrize("method, own", TRAVELS)
def test_what_travels_is_fedavgs(three, method, own):
    assert_received_is_fedavgs(three, method, {**OPTIONS, "lr_decay": 0.9, **own})


@pytest.mark.parametrize("method, own", ALONE)
def test_one_silo_is_local(three, method, own, tiny_bn):
    one = {"b": three["b"]}
    run, local = (federate(one, name, **{**OPTIONS, **own}) for name in (method, "local"))
    near(run.personal("b"), local.personal("b"), 1e-5 if method == "lg-mix" else 0)
    assert not same(run.personal("b"), initial(run.settings, 3, 3))
