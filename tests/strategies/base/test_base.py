"""What all methods stand on: the mean, participation, what leaves a silo, Flower's own loop."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from failing import fails
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from near import near
from tiny import (
    METHODS,
    TinyGrid,
    client_of,
    comparable,
    federate,
    forget_models,
    initial,
    random_silos,
    rows_of,
    same,
    session_of,
    settings_of,
    train_replies,
    write_silo,
)

from client.egress import check_sent, release, release_evidence, release_summary
from client.protocol.policy import PUBLIC, PolicyRefusedError, read_policy
from client.site.release import RECORD, TAKEN
from models.evidence.measure import Evidence
from partitions.common.errors import UserError
from server.run.loop import RoundLoop
from server.simulation.engine import flower_identity
from strategies.base.plan import RoundPlan, SiloInfo
from strategies.base.robust import weighted_mean
from strategies.base.transport.payload import decode, tensor_of

# ---- The weighted mean ---------------------------------------------------------------------------------------------


def test_weighted_mean_by_hand():
    """(1 · (2, 4) + 3 · (6, 0)) / 4 = (5, 1); the vectors stay as they are."""
    vectors = [torch.tensor([2.0, 4.0]), torch.tensor([6.0, 0.0])]
    assert weighted_mean(vectors, [1, 3]).tolist() == [5, 1]
    assert [v.tolist() for v in vectors] == [[2, 4], [6, 0]]
    assert weighted_mean([vectors[0]], [7]).tolist() == [2, 4]
    fails(ValueError, "no vectors", weighted_mean, [], [])
    with pytest.raises(ValueError):
        weighted_mean(vectors, [1])


def test_weighted_mean_adds_in_the_given_order():
    """float32 holds 2^24 + 1 as 2^24. Weights 1/4 of (2^26, 4, -2^26, 4): ((2^24 + 1) - 2^24) + 1 = 1, and
    ((2^24 - 2^24) + 1) + 1 = 2 in the other order: why updates are sorted.
    """
    big, one = torch.tensor([2.0**26]), torch.tensor([4.0])
    assert float(weighted_mean([big, one, -big, one], [1, 1, 1, 1])) == 1
    assert float(weighted_mean([big, -big, one, one], [1, 1, 1, 1])) == 2


@pytest.mark.parametrize("method", ["fedavg", "apple"])
def test_the_order_of_arrival_does_not_matter(three, method):
    def backwards(grid):
        pull = grid.pull_messages
        grid.pull_messages = lambda message_ids: list(pull(message_ids))[::-1]

    runs = [
        federate(three, method, rounds=3, batch_size=4, prepare=p) for p in (None, backwards)
    ]
    assert comparable(runs[0].rows) == comparable(runs[1].rows)


def test_silos_are_sorted_by_name_whatever_their_node(three):
    mixed = {name: three[name] for name in ("c", "a", "b")}
    runs = [federate(files, "fedavg", rounds=3, batch_size=4) for files in (three, mixed)]
    assert list(runs[1].strategy.silos) == ["a", "b", "c"]
    assert comparable(runs[0].rows) == comparable(runs[1].rows)


# ---- Participation -------------------------------------------------------------------------------------------------


def drawn(share, silos, seed=7, rounds=40):
    settings = settings_of({}, silos=1, strategy="local", participation=share, seed=seed)
    strategy = settings.strategy(settings.common, settings.method, None)  # type: ignore[arg-type]
    plan = RoundPlan().with_silos(
        [SiloInfo(f"s{i:02d}", i, 1) for i in range(silos)], settings.common
    )
    strategy.initialise(plan, lambda purpose: torch.zeros(1))
    result = []
    for strategy.round in range(1, rounds + 1):
        result.append(strategy.participants())
    return result


@pytest.mark.parametrize(
    "share, silos, size", [(1.0, 5, 5), (0.5, 5, 2), (0.3, 10, 3), (0.01, 5, 1), (0.99, 5, 4)]
)
def test_the_share_of_silos_that_train(share, silos, size):
    """max(int(ρ N), 1) different silos, sorted."""
    for names in drawn(share, silos):
        assert len(names) == len(set(names)) == size
        assert names == sorted(names)


def test_participants_follow_seed_and_round():
    assert drawn(0.5, 8) == drawn(0.5, 8)
    assert drawn(0.5, 8) != drawn(0.5, 8, seed=8)
    assert len({tuple(names) for names in drawn(0.5, 8)}) > 10
    # Every silo gets its turn: 40 rounds of 4 of 8; 20 each, within 4.5 standard errors of sqrt(40 / 4) = 3.2.
    counts = [sum(f"s{i:02d}" in names for names in drawn(0.5, 8)) for i in range(8)]
    assert all(abs(count - 20) < 14.3 for count in counts)


@pytest.mark.parametrize("method", METHODS)
def test_absent_silos_are_evaluated(three, method):
    """Who does not train is still measured on both snapshots; its personal model is that of its last round."""
    run = federate(three, method, rounds=4, participation=0.4, fedala__max_epochs=2)
    for r in range(1, 5):
        for snapshot in ("received", "personal"):
            rows = [
                row
                for row in run.rows
                if (row.round, row.snapshot, row.split) == (r, snapshot, "test")
            ]
            assert {row.silo for row in rows} == {"a", "b", "c"}
    trained = [key for key, _ in train_replies(run.grid)]
    assert [r for _, r in trained] == [1, 2, 3, 4]
    for silo in three:
        own = [r for s, r in trained if s == silo]
        losses = run.values("loss", silo, "personal")
        for r in range(2, 5):
            if r not in own and r - 1 not in own:
                assert losses[r - 1] == losses[r - 2]


def test_rounds_between_evaluations_have_no_metrics(two):
    run = federate(two, "fedavg", rounds=5, evaluate_every=2)
    assert {r.round for r in run.rows if r.split == "test"} == {2, 4, 5, 6}
    assert len(run.values("bytes_up")) == 6
    never = federate(two, "fedavg", rounds=3, evaluate_every=0)
    assert not [r for r in never.rows if r.split == "test"]
    assert len(never.values("bytes_up")) == 3


@pytest.mark.parametrize("method", METHODS)
def test_an_empty_round(two, method):
    """No local epochs and no evaluation: everything stays where it began."""
    options = {"fedavg-ft.epochs": 0, "fedprox-ft.epochs": 0, "apple.common-init": True}
    run = federate(two, method, rounds=2, local_epochs=0, evaluate_every=0, **options)
    for silo in two:
        near(run.personal(silo), initial(run.settings, 3, 3))


# ---- What leaves a silo --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "least, withheld", [(1, set()), (7, {"a"}), (9, {"a", "c"}), (0, {"a", "c"})]
)
def test_metrics_over_few_samples_are_withheld(three, least, withheld):
    """a, b, c have 6, 10 and 8 rows in every split; 0 means 10 for silos with files of their own.

    Nothing of a withheld split is in the reply; the history has one empty value per snapshot, so that it is seen.
    """
    run = federate(three, "fedavg", rounds=1, min_metric_samples=least)
    for message, reply in run.grid.traffic:
        if message.metadata.message_type in ("train", "evaluate"):
            names = set(reply.content["metrics"]) - {"seconds.train", "seconds.evaluate"}
            assert bool(names) == (run.grid.key_of(message)[0] not in withheld)
    for silo in three:
        rows = [r for r in run.rows if r.silo == silo and r.split in ("val", "test")]
        empty = [r for r in rows if math.isnan(r.value) and r.metric != "auc"]
        assert bool(empty) == (silo in withheld)
        if silo in withheld:
            assert len(empty) == len(rows) > 0
            assert {r.metric for r in rows} == {"accuracy"}
            assert all(r.cells()[7] == "" for r in rows)


MANY = {"train": 50, "val": 50, "test": 50}  # patients


def silo_half(files, **changes):
    forget_models()
    settings = settings_of(files, **changes)
    grid = TinyGrid(files, settings)
    return client_of(settings, session_of(settings, grid.contexts[1], classes=3).silo)


def test_only_what_is_declared_leaves(two):
    client = silo_half(two, strategy="fedavg")
    vector = torch.zeros(12)
    records = release(
        client,
        [vector],
        {"personal.test.loss": 0.5},
        MANY,
        min_samples=1,
        policy=read_policy(PUBLIC),
    )
    assert set(records) == {"model.model", "config", "metrics"}
    for name in ("dr", "personal.test.labels", "personal.cards.loss", "secret"):
        with pytest.raises(ValueError, match=f"metric '{name}' is not on the list"):
            release(
                client, [vector], {name: 1.0}, MANY, min_samples=1, policy=read_policy(PUBLIC)
            )
    with pytest.raises(ValueError):
        release(client, [vector, vector], {}, MANY, min_samples=1, policy=read_policy(PUBLIC))
    client.replies = {"dr": [0.5, 0.5]}
    with pytest.raises(ValueError, match="may not send 'dr': it has no kind"):
        release(client, [vector], {}, MANY, min_samples=1, policy=read_policy(PUBLIC))


def test_a_vector_of_the_models_size_is_the_whole_model(two):
    client = silo_half(two, strategy="fedavg")
    policy = read_policy(PUBLIC).model_copy(update={"whole_model": False})
    check_sent(client, [torch.zeros(11)], policy)
    line = "would send 12 numbers of a model of 12$"
    fails(PolicyRefusedError, line, check_sent, client, [torch.zeros(12)], policy)


def test_evidence_leaves_by_a_list_and_the_policy(two, monkeypatch):
    """What is on no list is an error. A kind that the policy lacks stays, and so do numbers of too few patients."""
    monkeypatch.setenv("SILOFL_SITE_AUDITS", TAKEN)
    client = silo_half(two, strategy="fedavg")
    policy = read_policy(PUBLIC).model_copy(update={"metrics": ["loss", "reliability"]})
    values = Evidence(brier=1.0, reliability=[5.0, 0.1, 0.2, 7.0, 0.5, 0.4])
    kept = {}
    for least in (5, 6):
        records = release_evidence(client, values, 9, min_samples=least, policy=policy)
        kept[least] = set(records["metrics"]), dict(records[RECORD])
    assert kept[5] == ({"reliability"}, {"metrics": ["brier"]})
    assert kept[6] == (set(), {"metrics": ["brier"], "min-metric-samples": ["reliability"]})
    with pytest.raises(UserError, match="evidence 'secret' is not on the list"):
        release_evidence(client, {"secret": 1.0}, 9, min_samples=1, policy=policy)


def test_the_data_summary_is_on_a_list_and_logged(two, caplog):
    """Once per run and silo; of the columns' sums the log has the number, for a table may have thousands."""
    caplog.set_level("INFO", logger="flwr")
    federate(two, "fedavg", rounds=1, normalization="agreed")
    lines = [
        r.getMessage() for r in caplog.records if "sent its data summary" in r.getMessage()
    ]
    assert [line.split()[0] for line in lines] == list(two)
    assert "'n_train': 6" in lines[0] and "'square_sum': 'of 3 columns'" in lines[0]
    fails(
        ValueError, "labels: not on the list", release_summary, {"name": "a", "labels": [1, 2]}
    )


# ---- Silos that do not fit -----------------------------------------------------------------------------------------


def test_the_first_of_two_silos_of_one_name_takes_part(three):
    def prepare(grid):
        grid.contexts[2].node_config["name"] = "a"

    run = federate(three, "fedavg", rounds=1, prepare=prepare)
    assert list(run.strategy.silos) == ["a", "c"]
    assert (
        "it is called a, as node 1 is: give each its own `name`"
        in run.federation.registration.left_out["node 2"]
    )


def test_a_silo_of_another_shape_is_left_out(two, tmp_path):
    files = {**two, "odd": random_silos(tmp_path, {"odd": 5}, columns=4)["odd"]}
    run = federate(files, "fedavg", rounds=1)
    assert list(run.strategy.silos) == ["a", "b"]
    assert (
        "odd is left out: it has samples of shape (4,), most silos have (3,)"
        in run.federation.registration.left_out["odd"]
    )


def test_the_largest_number_of_classes_counts(tmp_path):
    """One silo knows 2 classes, the other 5: the model has 5 outputs, Σ = 5 · 3 + 5."""
    files = {
        "few": write_silo(tmp_path / "few.npz", np.eye(3), [0, 1, 0], classes=2),
        "many": write_silo(tmp_path / "many.npz", np.eye(3), [0, 1, 4], classes=5),
    }
    run = federate(files, "fedavg", rounds=1)
    assert run.strategy.layout.size == 20


# ---- Flower's own loop ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_flowers_own_start_runs_our_strategies(three, method):
    """``Strategy.start`` knows nothing of our round loop; two rounds of it end where two of ours end."""
    options = {"strategy": method, "rounds": 2, "batch_size": 4, "fedala__max_epochs": 3}
    ours = federate(three, **options)
    forget_models()
    settings = settings_of(three, **options)
    grid = TinyGrid(three, settings)
    layout = ours.strategy.layout
    silos = [
        SiloInfo(n, i, len(rows_of(f)[1])) for i, (n, f) in enumerate(three.items(), start=1)
    ]
    strategy = settings.strategy(settings.common, settings.method, layout)
    plan = RoundPlan(last=settings.common.rounds).with_silos(silos, settings.common)
    strategy.initialise(plan, lambda purpose: initial(settings, 3, 3, purpose))
    with flower_identity():
        strategy.start(grid, ArrayRecord(), num_rounds=2)
    assert strategy.state.arrays.keys() == ours.held.keys()
    for name, vector in ours.held.items():
        assert same(strategy.state.arrays[name], vector)
    for silo in three:
        assert same(tensor_of(grid_state(grid, silo)["personal"]), ours.personal(silo))


def grid_state(grid, silo):
    record = next(
        c.state["arrays"] for c in grid.contexts.values() if c.node_config["name"] == silo
    )
    assert isinstance(record, ArrayRecord)
    return record


def test_configure_train_gives_a_list(two):
    """The deployment's grid goes over it twice; a generator would send nothing there."""
    run = federate(two, "fedavg", rounds=1)
    with flower_identity():
        messages = run.strategy.configure_train(
            1, ArrayRecord(), ConfigRecord({"save": False}), run.grid
        )
    assert isinstance(messages, list) and len(messages) == 2
    assert all(m.metadata.ttl == run.settings.common.round_timeout for m in messages)


def test_a_summary_says_no_labels(two):
    run = federate(two, "fedavg", rounds=1)
    summaries = [
        dict(r.content["summary"])
        for m, r in run.grid.traffic
        if m.metadata.message_type == "query"
    ]
    assert [c["name"] for c in summaries] == ["a", "b"]
    for summary in summaries:
        assert set(summary) <= {
            "name",
            "task",
            "n_train",
            "n_val",
            "n_test",
            "shape",
            "classes",
            "own_file",
            "simulated",
            "device",
            "threads",
            "versions",
            "schema",
        }
        assert (summary["shape"], summary["classes"]) == ([3], 3)


def test_an_unusable_silo_is_named_before_anything_starts(two, tmp_path):
    """The others go on without it, but not where the quorum is all of them."""
    (tmp_path / "broken.npz").write_bytes(b"not an archive")
    files = {**two, "x": tmp_path / "broken.npz"}
    run = federate(files, "fedavg", rounds=1)
    assert (
        list(run.strategy.silos) == ["a", "b"]
        and "broken.npz" in run.federation.registration.left_out["node 3"]
    )
    with pytest.raises(UserError, match=r"cannot take part: .*broken\.npz"):
        federate(files, "fedavg", rounds=1, min_silos=3)
    with pytest.raises(UserError, match=r"cannot take part: .*broken\.npz"):
        federate({"x": files["x"]}, "fedavg", rounds=1)


def test_federations_do_not_share_state(two):
    """A second run with the same grid starts afresh: the silos' states carry the id of the run that made them."""
    settings = settings_of(two, strategy="local", rounds=2)
    forget_models()
    grid = TinyGrid(two, settings)
    rows = []
    for _ in range(2):
        with flower_identity():
            federation = RoundLoop(grid, settings)
            federation.run()
        rows.append(comparable(federation.history.rows))
    assert rows[0] == rows[1]


def test_messages_hold_what_the_engine_needs(two):
    run = federate(two, "fedavg", rounds=1)
    content = next(m.content for m, _ in run.grid.traffic if m.metadata.message_type == "train")
    assert isinstance(content, RecordDict)
    config = decode(content)[1]
    assert config["round"] == 1 and config["classes"] == 3 and config["evaluate"] is True


@pytest.mark.parametrize("method", ["apple", "fedfomo", "fedamp", "fedavg"])
def test_no_silo_name_is_forbidden(method, two, tmp_path, tiny_bn):
    """A silo's name is no key of the method's own: silos called as those are get what silos a and b get."""
    options = {"strategy": method, "rounds": 3, "model": "tiny-bn"}
    renamed = federate({"buffers": two["a"], "global": two["b"]}, **options, seed=7)
    assert renamed.strategy.rejected == {}
    assert not same(renamed.personal("buffers"), renamed.personal("global"))
    plain = federate(two, **options, seed=7)
    assert renamed.values("bytes_down") == plain.values("bytes_down")
