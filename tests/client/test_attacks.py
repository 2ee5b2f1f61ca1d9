"""What a server that chooses every setting gets out of a hospital: each attack that worked once, against what is there.

The silo is the real app on a file of its own, asked as the round loop asks it; the attacker knows the code, the
settings that it chose, and how many patients there are.
"""

from __future__ import annotations

import itertools
import os

import numpy as np
import numpy.typing as npt
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from tiny import PLAIN, federate, random_silos, rows_of, write_silo

from client.app import app
from client.protocol import policy as module
from client.site.record import Record
from models.standardisation import column_sums, rounded_sums
from partitions.npz import write_npz
from partitions.schemes.pool import hold_out
from strategies.base.run_settings import parse_settings
from strategies.base.state import State

Numbers = npt.NDArray[np.float64]
RUNS = [(seed, share) for seed in range(20) for share in (0.1, 0.2, 0.3)]  # sixty

pytestmark = pytest.mark.usefixtures("identity")


@pytest.fixture
def patients():
    """Sixty patients, four columns, on the scales of a clinic."""
    rng = np.random.default_rng(5)
    return rng.normal(size=(60, 4)) * [15, 1, 40, 0.3] + [60, 170, 200, 1]


def write(file, x):
    """A table whose training part is not named: x_train and x_test, from which the old code drew by the run's seed."""
    y = np.arange(len(x)) % 2
    test = {"x_test": x[:12].astype(np.float32) + 1, "y_test": y[:12]}
    write_npz(file, {"x_train": x.astype(np.float32), "y_train": y, **test})
    return file


def summary(file, state, policy="", run=1, **settings):
    """The data summary, or ``{"error": reason}``, that the silo gives for these settings."""
    values = {
        **PLAIN,
        "normalization": "agreed",
        "batch-size": 64,
        "min-metric-samples": 1,
        "strategy": "fedavg",
    }
    given = {key.replace("_", "-"): value for key, value in settings.items()}
    node = {
        "name": "clinic",
        "data": str(file),
        "policy": policy,
        **({"state-dir": str(state)} if state else {}),
    }
    context = Context(run, 1, node, RecordDict(), parse_settings({**values, **given}).flat())
    reply = app(Message(RecordDict({"config": ConfigRecord({})}), 1, "query"), context)
    return (
        {"error": reply.error.reason} if reply.has_error() else dict(reply.content["summary"])
    )


def solve(summaries, masks):
    """The records that fit all summaries best, if the attacker is right about who was in each training part."""
    sums = np.array([c["sum"] for c in summaries])
    return np.linalg.lstsq(np.array(masks, float), sums, rcond=None)[0]


def found(guess, patients):
    """Patients of whom every column was guessed to a tenth of its standard deviation."""
    return int((np.abs(guess - patients) < 0.1 * patients.std(0)).all(1).sum())


# ---- The sixty-run reconstruction ------------------------------------------------------------------------------------


def drawn_by(seed, share, n):
    """Who was in the training part of a run, as the code before drew it."""
    mask = np.zeros(n, bool)
    mask[hold_out(np.arange(n), share, np.random.default_rng(seed))[0]] = True
    return mask


def test_the_sixty_run_reconstruction(patients, tmp_path):
    """Before: each run drew its training part, its summary had the exact sums; sixty runs gave sixty of sixty patients.

    Now: sixty summaries are one summary, whatever the runs ask for, and it is rounded.
    """
    x = patients.astype(np.float32)
    masks = [drawn_by(seed, share, len(x)) for seed, share in RUNS]
    before = [{"sum": column_sums(x[mask])[0]} for mask in masks]
    old = solve(before, masks)
    assert found(old, patients) == 60 and np.abs(old - x).max() < 1e-6

    file, state = write(tmp_path / "own.npz", patients), tmp_path / "state"
    asked = [
        summary(file, state, run=1 + i % 20, seed=seed, validation=share)
        for i, (seed, share) in enumerate(RUNS)
    ]
    assert all("sum" in c for c in asked)
    assert len({(c["n_train"], c["n_val"], *c["sum"], *c["square_sum"]) for c in asked}) == 1
    assert found(solve(asked, masks), patients) == 0


def test_runs_that_leave_validation_unused_train_on_no_one_else(patients, tmp_path):
    file, state = write(tmp_path / "own.npz", patients), tmp_path / "state"
    with_it, without = summary(file, state, validation=-1), summary(file, state, validation=0)
    assert (with_it["n_train"], with_it["n_val"]) == (51, 9)
    assert (without["n_train"], without["n_val"]) == (51, 0)
    assert without["sum"] == with_it["sum"]


def test_a_sixty_first_run_on_one_day(patients, tmp_path):
    """Runs are counted, not messages; what was counted outlives the process, and a number of its own is none."""
    file, state = write(tmp_path / "own.npz", patients), tmp_path / "state"
    assert all("sum" in summary(file, state, run=run) for run in range(1, 21) for _ in range(2))
    assert summary(file, state, run=21)["error"].startswith(
        "clinic refuses: its policy has runs-per-day = 20, and this is"
    )
    assert "sum" in summary(file, state, run=20)


# ---- The two-summary difference --------------------------------------------------------------------------------------


def test_the_two_summary_difference(patients, tmp_path):
    """One patient more in the file: the second summary has no sums, and why; the first one's come again after."""
    file, state = tmp_path / "own.npz", tmp_path / "state"
    val = {"x_val": np.zeros((0, 4), np.float32), "y_val": np.zeros(0, int)}
    test = {"x_test": patients[:12].astype(np.float32), "y_test": np.arange(12) % 2}

    def version(n):
        y = np.arange(n) % 2
        write_npz(
            file, {"x_train": patients[:n].astype(np.float32), "y_train": y, **val, **test}
        )
        os.utime(file, ns=(n, n))
        return file

    first, second, again = (summary(version(n), state) for n in (59, 60, 59))
    assert "sum" in first and "sum" not in second and again["sum"] == first["sum"]
    assert second["sums_withheld"] == (
        "its policy has min-sum-samples = 50, and fewer patients differ from those it gave sums of before"
    )


def test_what_was_given_outlives_the_process_and_nothing_is_given_where_it_is_lost(
    patients, tmp_path
):
    """The state directory remembers; without one, or where its record is damaged or gone, there are no sums."""
    file, state = write(tmp_path / "own.npz", patients), tmp_path / "state"
    first = summary(file, state)
    assert summary(file, state, seed=2)["sum"] == first["sum"]  # the rounding draws nothing
    with Record(state).write() as db:
        db.execute("UPDATE disclosed SET answer = '{'")
    assert "cannot be remembered" in summary(file, state, seed=2)["sums_withheld"]
    (state / "record.sqlite").unlink()
    assert "record.sqlite is missing" in summary(file, state)["error"]
    nowhere = summary(
        file, None, policy=str(loose(tmp_path, "runs-per-day = 0", "max-messages = 0"))
    )
    assert nowhere["sums_withheld"] == "it has no state-dir to remember what it gave"


def loose(folder, *lines):
    file = folder / "policy.toml"
    file.write_text("\n".join(lines) + "\n")
    return file


def test_rounding_tells_of_no_patient(patients):
    """Even where both summaries had sums: whoever of the sixty is taken out, their difference is one of two numbers.

    Exact sums' difference is the record itself.
    """
    n = len(patients)
    for sums, most in ((column_sums, n), (rounded_sums, 2)):
        summaries = [sums(np.delete(patients, i, 0)) for i in range(n)]
        for kind in (0, 1):
            each = np.array(sums(patients)[kind]) - np.array(
                [summary[kind] for summary in summaries]
            )
            assert max(len(np.unique(column.round(6))) for column in each.T) <= most
            assert sums is rounded_sums or np.allclose(each, patients ** (kind + 1))


def test_a_column_in_which_one_patient_differs_looks_like_one_in_which_none_does():
    """A rare diagnosis: 0 of 64, or 1 of 64."""
    none, one = np.zeros((64, 1)), np.zeros((64, 1))
    one[17] = 1
    assert rounded_sums(none) == rounded_sums(one)


# ---- The one-sample silo ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 9])
def test_the_one_sample_silo(tmp_path, n):
    """A file whose training part is one patient: its gradient is that patient. No summary, model or sums leave."""
    file = tmp_path / "one.npz"
    x, y = np.ones((n, 3), np.float32) * np.arange(n)[:, None], np.arange(n) % 2
    parts = {
        f"{kind}_{split}": v for split in ("train", "test") for kind, v in (("x", x), ("y", y))
    }
    write_npz(file, {**parts, "classes": np.array(2)})
    reply = summary(file, tmp_path / "state")
    assert reply["error"].startswith(
        "clinic refuses: its policy has floor = 10, its training part has fewer patients"
    )
    with Record(tmp_path / "state").reading() as db:
        assert db.execute("SELECT count(*) FROM disclosed").fetchone() == (0,)


def test_sums_are_of_enough_samples_only(patients, tmp_path):
    file = write(tmp_path / "own.npz", patients[:40])
    assert summary(file, tmp_path / "state")["sums_withheld"] == (
        "its policy has min-sum-samples = 50, its training part has fewer patients"
    )


# ---- Many records of few patients ------------------------------------------------------------------------------------


STAMPS = itertools.count()  # another time for each version of a file


def records(file, x, patient):
    """A table whose records are of these patients, all for training but three patients of its own."""
    arrays = {
        "x_train": x.astype(np.float32),
        "y_train": np.arange(len(x)) % 2,
        "patient_train": patient,
    }
    for i, part in enumerate(("val", "test")):
        arrays |= {f"x_{part}": x[:4].astype(np.float32) + 1 + i, f"y_{part}": np.arange(4) % 2}
        arrays[f"patient_{part}"] = np.full(4, 1000 + i)
    write_npz(file, arrays)
    os.utime(file, ns=(0, next(STAMPS)))
    return file


def test_what_leaves_is_of_enough_patients(tmp_path):
    """600 records: of 9 patients nothing leaves, of 49 no sums; how many patients there are, no reason tells."""
    x, file = np.random.default_rng(7).normal(size=(600, 4)), tmp_path / "own.npz"
    few = [
        summary(records(file, x, np.arange(600) % count), tmp_path / "state")
        for count in (9, 49, 50)
    ]
    assert (
        few[0]["error"]
        == "clinic refuses: its policy has floor = 10, its training part has fewer patients"
    )
    assert (
        few[1]["sums_withheld"]
        == "its policy has min-sum-samples = 50, its training part has fewer patients"
    )
    assert "sum" in few[2]


def test_a_patient_of_many_records_is_one_in_the_difference_of_two_versions(tmp_path):
    """Sixty records more, all of one patient, or 49 corrected patients: the sums wait. Of 50 others, they leave."""
    x = np.random.default_rng(7).normal(size=(660, 4))
    file = tmp_path / "own.npz"
    state = tmp_path / "state"
    whose = np.arange(660) % 60
    first = summary(records(file, x[:600], whose[:600]), state)
    held = "its policy has min-sum-samples = 50, and fewer patients differ from those it gave sums of before"
    came = np.append(whose[:600], np.full(60, 60))
    corrected = x[:600] + (whose[:600] < 49)[:, None]
    assert summary(records(file, x, came), state)["sums_withheld"] == held
    assert summary(records(file, corrected, whose[:600]), state)["sums_withheld"] == held
    assert summary(records(file, x[:600], whose[:600]), state)["sum"] == first["sum"]
    with Record(state).write() as db:
        # As 0.2.0 did
        db.execute("UPDATE disclosed SET answer = json_remove(answer, '$.patients')")
    assert summary(records(file, x, came), state)["sums_withheld"] == held
    assert (
        summary(records(file, x[:600] + (whose[:600] < 50)[:, None], whose[:600]), state)["sum"]
        != first["sum"]
    )


def test_rounding_tells_of_no_patient_with_many_records(patients):
    """Whoever of sixty patients is taken out, with all of seven records; rounded by rows, the difference tells more."""
    rng = np.random.default_rng(3)
    x = np.repeat(patients, 7, 0) + rng.normal(size=(420, 4)) * patients.std(0) / 10
    differences = {}
    for k in (1, 7):
        each = [rounded_sums(np.delete(x, slice(7 * i, 7 * i + 7), 0), k)[0] for i in range(60)]
        differences[k] = max(len(np.unique(column.round(6))) for column in np.array(each).T)
    assert differences[7] <= 2 < differences[1]


# ---- The weakened setting --------------------------------------------------------------------------------------------

WEAKENED = [
    (
        {"local_epochs": 1000},
        "its policy has max-local-epochs = 20, the run local-epochs = 1000",
    ),
    ({"batch_size": 1}, "its policy has min-batch-size = 8, the run batch-size = 1"),
    (
        {"strategy": "apple"},
        "its policy has peers = false, the run strategy = apple, which hands a silo's model",
    ),
    (
        {"strategy": "fedfomo"},
        "its policy has peers = false, the run strategy = fedfomo, which hands a silo's model",
    ),
    (
        {"strategy": "fedproto"},
        "its policy has class-means = false, the run strategy = fedproto",
    ),
    ({"strategy": "fedpac"}, "its policy has class-means = false, the run strategy = fedpac"),
]


@pytest.mark.parametrize(("settings", "reason"), WEAKENED, ids=[str(s) for s, _ in WEAKENED])
def test_the_weakened_setting(patients, tmp_path, settings, reason):
    reply = summary(write(tmp_path / "own.npz", patients), tmp_path / "state", **settings)
    assert reply["error"].startswith(f"clinic refuses: {reason}") and "\n" not in reply["error"]


@pytest.fixture
def four(tmp_path):
    """Enough samples for a policy's defaults; silo d has fewer than ten for its metrics."""
    return random_silos(tmp_path, {"a": 30, "b": 24, "c": 27, "d": 12})


def run(files, tmp_path, **changes):
    return federate(
        files,
        state_dir=tmp_path / "states",
        directory=tmp_path / "run",
        **{"batch_size": 16, **changes},
    )


def test_a_metric_over_few_samples_stays_whatever_the_run_says(four, tmp_path):
    """min-metric-samples = 1 is the run's, 13 the site's: silo d's metrics stay, and the history says that they do."""
    policy = str(loose(tmp_path, "min-metric-samples = 13", 'metrics = ["accuracy"]'))
    done = run(four, tmp_path, policy=policy, strategy="fedavg", rounds=2, min_metric_samples=1)
    measured = {
        (row.silo, row.metric)
        for row in done.rows
        if row.split == "test" and row.value == row.value
    }
    assert measured == {("a", "accuracy"), ("b", "accuracy"), ("c", "accuracy")}
    assert "personal.train.loss" not in done.grid.traffic[-1][1].content.get("metrics", {})


def test_a_silo_that_refuses_leaves_the_others_to_go_on(four, tmp_path, caplog):
    """One hospital of four keeps its model from peers; APPLE trains with the three, and says who refused and why."""
    strict = str(loose(tmp_path, "peers = false", "runs-per-day = 0"))

    def prepare(grid):
        grid.contexts[2].node_config["policy"] = strict

    done = run(four, tmp_path, prepare=prepare, strategy="apple", rounds=2)
    assert sorted(done.strategy.silos) == ["a", "c", "d"] and done.values("bytes_up") == [
        144,
        144,
        0,
    ]
    assert "b refuses: its policy has peers = false, the run strategy = apple" in caplog.text


def test_fewer_silos_than_a_hospital_wants(four, tmp_path):
    """The server tells how many train; a quarter of four is one, and the hospital is not alone with the server."""
    policy = str(loose(tmp_path, "runs-per-day = 0"))
    with pytest.raises(
        RuntimeError, match=r"refuses: its policy has min-silos = 3, the round 1 that train"
    ):
        run(four, tmp_path, policy=policy, strategy="fedavg", rounds=1, participation=0.25)
    done = run(
        four, tmp_path / "all", policy=policy, strategy="fedavg", rounds=1, min_metric_samples=1
    )
    assert not done.strategy.rejected


@pytest.mark.parametrize("personal", ["none", "", ",", "fc1"])
def test_shared_layers_only(four, tmp_path, personal):
    """whole-model = false: no value of ``personal`` sends every layer, and one that keeps a layer is allowed."""
    policy = str(loose(tmp_path, "whole-model = false", "runs-per-day = 0"))
    given = {
        "strategy": "fedrep",
        "mlp__hidden": "4",
        "fedrep__personal": personal,
        "rounds": 1,
    }
    if personal == "fc1":
        assert not run(four, tmp_path, policy=policy, **given).strategy.rejected
        return
    with pytest.raises(
        ValueError, match=r"its policy has whole-model = false, the run strategy = fedrep with"
    ):
        run(four, tmp_path, policy=policy, **given)


def test_the_size_of_what_is_sent_counts_whatever_a_method_declares(
    four, tmp_path, monkeypatch
):
    """A method that the table takes for a partial one, and that sends all: the app looks at the vector itself."""
    monkeypatch.setitem(module.METHODS, "fedavg", {"whole": False})
    policy = str(loose(tmp_path, "whole-model = false", "runs-per-day = 0"))
    with pytest.raises(
        RuntimeError,
        match=r"whole-model = false, the run strategy = fedavg, which would send 12 ",
    ):
        run(four, tmp_path, policy=policy, strategy="fedavg", rounds=1)


# ---- Where a site gives no sums --------------------------------------------------------------------------------------


def test_the_federation_goes_on_with_the_others_sums(four, tmp_path, caplog):
    """Silo b gives none: it is standardised by its own statistics, the others by those of a, c and d, as is said."""
    no_sums = str(loose(tmp_path, "sums = false", "runs-per-day = 0", "min-silos = 1"))

    def prepare(grid):
        grid.contexts[2].node_config["policy"] = no_sums

    done = run(
        four, tmp_path, prepare=prepare, strategy="fedavg", rounds=1, normalization="agreed"
    )
    line = "b gives no sums of its columns: its policy has sums = false; it is standardised by its own statistics, "
    assert line + "the others by those of 3 silos" in caplog.text
    assert line in (tmp_path / "run/progress.jsonl").read_text()
    rows = {name: np.load(file)["x_train"].astype(np.float64) for name, file in four.items()}
    pooled = np.concatenate([rows[name] for name in "acd"])
    assert done.strategy.plan.numbers["mean"] == pytest.approx(pooled.mean(0))
    assert done.strategy.plan.numbers["own_statistics"] == ["b"]
    for name, expected in (("a", pooled), ("b", rows["b"])):
        kept = next((tmp_path / "states").rglob(f"{name}/run-*/round-000001.safetensors"))
        scale = State.load(kept).numbers["model"]["normalisation"]
        assert scale["mean"] == pytest.approx(expected.mean(0), abs=1e-6)
        assert scale["std"] == pytest.approx(expected.std(0), abs=1e-6)


# ---- The two-version difference of metrics ---------------------------------------------------------------------------


def test_metrics_of_one_model_before_and_after_a_patient_came(tmp_path):
    """The initial model of a seed is the same in every run: its losses on two files would give one patient's loss."""
    files = random_silos(tmp_path, {"a": 60, "b": 60, "c": 60})
    policy = loose(tmp_path, "min-silos = 1")
    x, y = rows_of(files["a"])

    def losses(rows):
        def prepare(grid):
            for context in grid.contexts.values():
                context.run_id = rows

        write_silo(files["a"], x[:rows].tolist(), y[:rows].tolist(), 3)
        given = {"strategy": "fedavg", "rounds": 1, "prepare": prepare, "policy": str(policy)}
        run = federate(files, state_dir=tmp_path / "state", **given)
        assert len(run.values("loss", "b", "received")) == 2
        wanted = ("a", "test", "received", "loss")
        return {
            r.round: r.value
            for r in run.rows
            if (r.silo, r.split, r.snapshot, r.metric) == wanted
        }

    first, one_less = losses(60), losses(59)
    assert set(first) == {1, 2} and set(one_less) == {2}  # round 2 has another model
    assert losses(60)[1] == first[1]  # the same question has the same answer


def one_patient_less(arrays):
    return {key: v[:-2] if key.endswith("_test") else v for key, v in arrays.items()}


def one_patient_moved(arrays):
    """From test to validation."""
    moved = {
        f"{key}_val": np.concatenate([arrays[f"{key}_val"], arrays[f"{key}_test"][-2:]])
        for key in "xy"
    }
    return one_patient_less(arrays) | moved


def named(arrays):
    """Two samples a patient, in a file that named none."""
    parts = {part: len(arrays[f"y_{part}"]) for part in ("train", "val", "test")}
    ids = {
        f"patient_{p}": 1000 * k + np.arange(n) // 2 for k, (p, n) in enumerate(parts.items())
    }
    return {**arrays, **ids}


@pytest.mark.parametrize(
    ("change", "first"),
    [
        pytest.param(
            one_patient_less, {"validation": 0.0}, id="validation = 0 in the first run"
        ),
        pytest.param(lambda a: named(one_patient_less(a)), {}, id="patients named since"),
        pytest.param(one_patient_moved, {}, id="in another part"),
    ],
)
def test_metrics_of_two_versions_whose_test_parts_differ_in_one_patient(
    tmp_path, change, first
):
    """Whatever the run leaves unused, whether the file names patients, and where the patient is now."""
    rng = np.random.default_rng(3)
    arrays = {"classes": np.array(2)}
    for part in ("train", "val", "test"):
        arrays |= {f"x_{part}": rng.normal(size=(60, 3)).astype(np.float32)}
        arrays |= {f"y_{part}": rng.integers(2, size=60)}
    policy = loose(tmp_path, "min-silos = 1")

    def losses(arrays, number, **changes):
        def prepare(grid):
            for context in grid.contexts.values():
                context.run_id = number

        np.savez(tmp_path / "a.npz", **arrays)
        given = {"strategy": "fedavg", "rounds": 1, "prepare": prepare, "policy": str(policy)}
        run = federate(
            {"a": tmp_path / "a.npz"}, state_dir=tmp_path / "state", **given, **changes
        )
        rows = [(row.round, row.split, row.metric) for row in run.rows]
        return (1, "test", "loss") in rows

    assert losses(arrays, 1, **first) and not losses(change(arrays), 2)


@pytest.mark.parametrize(("outlined", "leave"), [(1, False), (10, True)])
def test_the_dice_of_few_outlines_stays(tmp_path, outlined, leave):
    """Twenty test patients, and Dice is of those with an outline; the model outlines nothing."""
    x = np.random.default_rng(0).integers(0, 40, (20, 16, 16)).astype(np.uint8)
    y = np.zeros((20, 16, 16), np.uint8)
    y[:outlined, 4:12, 4:9] = 1
    y[outlined:, 0, 0] = 255  # ignored: no outline
    parts = {
        f"{key}_{part}": v
        for part in ("train", "val", "test")
        for key, v in zip("xy", (x, y), strict=True)
    }
    np.savez(tmp_path / "a.npz", classes=np.array(2), **parts)  # type: ignore[arg-type]
    given = {"state_dir": tmp_path / "state", "policy": str(loose(tmp_path, "min-silos = 1"))}
    run = federate(
        {"a": tmp_path / "a.npz"}, strategy="fedavg", rounds=1, model="auto", **given
    )
    assert ("dice" in {row.metric for row in run.rows}) == leave
