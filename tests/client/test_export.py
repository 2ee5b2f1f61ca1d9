"""``silofl export`` and ``silofl predict``: the model that leaves is the silo's own, and usable without us."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import numpy as np
import pytest
import safetensors.torch
import torch
from damage import damaged
from failing import fails
from predictions import read_csv
from tiny import federate, json_of, random_silos, rows_of, small_study, write_silo

from client.export import card_file, export_model, read_model
from client.exporting.model_card import Scale
from client.prediction.predict import predict_file
from models.networks.blocks import StemSettings
from models.networks.registry import build
from models.samples import Samples
from models.training import predict
from partitions.inputs import read_inputs
from partitions.stored import together
from strategies.base.state import State


def test_table_model_is_the_silos_own(tmp_path):
    """Deployed silos (state-dir), columns of very different scale, one hidden layer.

    ``agreed`` standardisation: mean and std over both silos' training rows, here by numpy. The network by hand:
    softmax(W2 relu(W1 (x - mean) / std + b1) + b2). Its accuracy on the silo's test rows must be the card's.
    """
    files = scaled_silos(tmp_path)
    run = federate(
        files,
        state_dir=tmp_path / "state",
        directory=tmp_path / "run",
        rounds=3,
        strategy="apple",
        normalization="agreed",
        mlp__hidden="5",
        learning_rate=0.3,
    )
    card = export_model(tmp_path / "state", "b", "last", tmp_path / "out/b.safetensors")
    assert card.text == (tmp_path / "out/b.safetensors.json").read_bytes()
    assert (card.method, card.seed, card.silo, card.round, card.which) == (
        "apple",
        7,
        "b",
        3,
        "last",
    )
    assert card.paper == run.strategy.info.paper and card.classes == 3
    assert card.samples == {"train": 10, "val": 10, "test": 10}
    assert card.model.model_dump(exclude_unset=True) == {
        "name": "mlp",
        "settings": {"hidden": "5", "dropout": 0.0},
    }
    assert card.input.model_dump(exclude_unset=True) == {"shape": [3], "dtype": "float32"}

    pooled = np.concatenate([rows_of(files[name])[0] for name in ("a", "b")])
    mean, std = pooled.mean(0), pooled.std(0)
    assert card.normalisation and np.allclose(card.normalisation.mean, mean, rtol=1e-5)
    assert np.allclose(card.normalisation.std, std, rtol=1e-5)

    w = {
        k: v.double().numpy()
        for k, v in safetensors.torch.load_file(tmp_path / "out/b.safetensors").items()
    }
    x, y = rows_of(files["b"])
    hidden = np.maximum((x - mean) / std @ w["fc1.weight"].T + w["fc1.bias"], 0)
    p = np.exp(hidden @ w["fc2.weight"].T + w["fc2.bias"])
    p /= p.sum(1, keepdims=True)
    index, label, given = read_csv(predict_file(tmp_path / "out/b.safetensors", files["b"]))
    assert index == list(range(10))
    assert np.allclose(given, p, atol=1e-5)
    assert label == p.argmax(1).tolist()
    assert card.metrics["test.accuracy"] == np.mean(p.argmax(1) == y)
    assert math.isclose(
        card.metrics["test.loss"] or 0.0, -np.log(p[range(10), y]).mean(), rel_tol=1e-5
    )


@pytest.mark.parametrize("normalization", ["agreed", "silo"])
@pytest.mark.parametrize("value", [36.7, 0.1, -1e6, 0.0])
def test_a_column_that_never_changes_is_not_blown_up(tmp_path, value, normalization):
    """99 rows of 36.7 have a mean square that is not the square of their mean in the last bit: std 1, not 1e-7.

    Beside it a column of a small spread about a large mean, which stays as it is: 1e6 ± 1/2.
    """
    rng = np.random.default_rng(0)
    files = {}
    for name, n in (("a", 99), ("b", 1001)):
        x = np.stack([np.full(n, value), 1e6 + rng.integers(0, 2, n), rng.normal(size=n)], 1)
        files[name] = write_silo(tmp_path / f"{name}.npz", x, [0, 1] * (n // 2) + [0])
    federate(
        files,
        state_dir=tmp_path / "states",
        directory=tmp_path / "run",
        rounds=1,
        normalization=normalization,
    )
    card = export_model(tmp_path / "states", "a", "last", tmp_path / "a.safetensors")
    std = card.normalisation.std if card.normalisation else [0.0, 0.0]
    assert std[0] == 1
    assert std[1] == pytest.approx(0.5, rel=0.1)


def test_silos_own_standardisation(tmp_path):
    """``normalization = "silo"``: the card holds the statistics of the silo's own training rows; ``none``: nothing."""
    files = scaled_silos(tmp_path)
    federate(
        files,
        state_dir=tmp_path / "silo",
        directory=tmp_path / "run1",
        rounds=1,
        normalization="silo",
    )
    card = export_model(tmp_path / "silo", "a", "last", tmp_path / "a.safetensors")
    x, _ = rows_of(files["a"])
    assert card.normalisation and np.allclose(card.normalisation.mean, x.mean(0), rtol=1e-5)
    assert np.allclose(card.normalisation.std, x.std(0), rtol=1e-5)
    federate(
        files,
        state_dir=tmp_path / "none",
        directory=tmp_path / "run2",
        rounds=1,
        normalization="none",
    )
    assert (
        export_model(tmp_path / "none", "a", "last", tmp_path / "a.safetensors").normalisation
        is None
    )


def test_pictures_and_batch_norm(tmp_path):
    """A run directory; bytes are scaled to [-1, 1], and the running statistics travel with the model."""
    rng = np.random.default_rng(3)
    x, y = rng.integers(0, 256, (120, 8, 8, 3), np.uint8), np.arange(120) % 3
    x[y == 1] //= 3  # something to learn
    np.savez(
        tmp_path / "pictures.npz", x_train=x[:90], y_train=y[:90], x_test=x[90:], y_test=y[90:]
    )
    network = {"model": "resnet8", "resnet8.stem": "3x3", "batch-size": 16}
    run = small_study(tmp_path / "run", tmp_path / "pictures.npz", silos=2, **network)
    model = tmp_path / "m.safetensors"
    card = export_model(run, "hospital-02", "last", model)
    assert card.model.model_dump(exclude_unset=True) == {
        "name": "resnet8",
        "settings": {"stem": "3x3"},
    }
    assert card.input.model_dump(exclude_unset=True) == {"shape": [3, 8, 8], "dtype": "uint8"}
    assert card.normalisation == Scale(mean=127.5, std=127.5)

    module = build("resnet8", (3, 8, 8), 3, StemSettings("3x3"))
    module.load_state_dict(safetensors.torch.load_file(model))
    module.eval()
    inputs = torch.from_numpy(x[90:]).permute(0, 3, 1, 2).double() / 255
    with torch.no_grad():
        p = module.double()((inputs - 0.5) / 0.5).softmax(1)
    index, label, given = read_csv(predict_file(model, tmp_path / "pictures.npz"))
    assert len(index) == 30 and np.allclose(given, p.numpy(), atol=1e-4)
    assert label == p.argmax(1).tolist()

    # Without the running statistics the same weights say something else.
    fresh = build("resnet8", (3, 8, 8), 3, StemSettings("3x3")).eval().double()
    fresh.load_state_dict({**module.state_dict(), **dict(fresh.named_buffers())})
    with torch.no_grad():
        assert not np.allclose(given, fresh((inputs - 0.5) / 0.5).softmax(1).numpy(), atol=1e-2)


def test_best_and_last(tmp_path):
    """``best`` is the personal model of the first round with the highest validation accuracy, ``last`` the last."""
    run, accuracy = jumpy_run(tmp_path)
    best_round = 1 + int(np.argmax(accuracy))
    assert best_round < len(accuracy), (
        "the data of this test should make an earlier round the best"
    )
    best = export_model(tmp_path / "run", "b", "best", tmp_path / "best.safetensors")
    last = export_model(tmp_path / "run", "b", "last", tmp_path / "last.safetensors")
    assert (best.round, last.round) == (best_round, len(accuracy))
    assert best.metrics["val.accuracy"] == max(accuracy)
    assert last.metrics["val.accuracy"] == accuracy[-1]
    weights = {
        k: safetensors.torch.load_file(tmp_path / f"{k}.safetensors") for k in ("best", "last")
    }
    assert torch.equal(flat(weights["last"]), run.personal("b"))
    assert torch.equal(flat(weights["best"]), run.grid.state("b").arrays["best"])
    assert not torch.equal(flat(weights["best"]), flat(weights["last"]))


def test_a_round_without_evaluation_is_not_the_best(tmp_path):
    """Evaluated in rounds 2 and 4 of 4: the best of these two, and no round of which nothing is known."""
    _, accuracy = jumpy_run(tmp_path, evaluate_every=2, rounds=4)
    assert len(accuracy) == 2 and accuracy[0] > accuracy[1]
    assert export_model(tmp_path / "run", "b", "best", tmp_path / "b.safetensors").round == 2


def test_one_of_several_runs(tmp_path):
    files = random_silos(tmp_path, {"a": 6, "b": 10})
    for name, strategy, seed in (
        ("one", "local", 7),
        ("one", "fedavg", 7),
        ("two", "local", 7),
        ("two", "local", 8),
    ):
        federate(
            files,
            state_dir=tmp_path / "state",
            directory=tmp_path / f"{name}-{strategy}-{seed}" / name,
            rounds=1,
            strategy=strategy,
            seed=seed,
        )
    state, out = tmp_path / "state", tmp_path / "m.safetensors"
    refused(
        r"several models of a: one/fedavg-7, one/local-7, two/local-7, two/local-8; ",
        state,
        "a",
        "best",
        out,
    )
    refused(
        r"several models of a: one/local-7, two/local-7; ", state, "a", "best", out, "local", 7
    )
    refused(
        r"no model of a by apple seed 7; there are: fedavg-7, local-7$",
        state / "one",
        "a",
        "best",
        out,
        "apple",
        7,
    )
    refused(
        r"unknown silo in .*: 'aa' \(did you mean 'a'\?\); there are: a, b$",
        state,
        "aa",
        "best",
        out,
    )
    assert not out.exists() and not card_file(out).exists()
    assert export_model(state, "a", "best", out, seed=8).seed == 8
    assert export_model(state, "a", "best", out, "fedavg").method == "fedavg"
    assert export_model(state / "one", "a", "best", out, "local").method == "local"
    assert export_model(state / "one/local-7", "a", "best", out).method == "local"
    assert export_model(state / "one/local-7/a", "a", "best", out).method == "local"


def test_several_runs_of_the_same_name(tmp_path):
    """Each has its own folder; which is meant has to be said."""
    files = random_silos(tmp_path, {"a": 6, "b": 10})
    state, out = tmp_path / "state", tmp_path / "m.safetensors"
    ids = []
    for number in (1, 2):
        place = {"state_dir": state, "directory": tmp_path / str(number) / "run"}
        ids.append(
            federate(files, rounds=number, strategy="local", **place).federation.state.run_id
        )
    refused(
        rf"several models of a: .*run-{min(ids)}, 20.*; choose with --run-id$",
        state,
        "a",
        "last",
        out,
    )
    for number, run_id in enumerate(ids, 1):
        card = export_model(state / "run", "a", "last", out, run_id=run_id[:12])
        assert (card.round, card.run) == (number, run_id)
    refused(
        r"no model of a by run-id xyz; there are: local-7 \(run-",
        state / "run",
        "a",
        "last",
        out,
        run_id="xyz",
    )
    own = state / "run/local-7/a" / f"run-{ids[0]}"
    assert export_model(own, "a", "last", out).round == 1
    assert export_model(own.parent, "a", "last", out, run_id=ids[1]).round == 2


def test_what_cannot_be_exported(tmp_path):
    out = tmp_path / "m.safetensors"
    refused("there is no directory", tmp_path / "nowhere", "a", "best", out)
    refused("holds no silo's state", tmp_path, "a", "best", out)
    State({}, {"round": 1}).save(tmp_path / "state/local-7/a/round-000001.safetensors")
    refused("does not say what model it holds", tmp_path / "state", "a", "best", out)
    (tmp_path / "state/local-7/a/round-000001.safetensors").write_bytes(b"cut short")
    refused(r"round-000001\.safetensors cannot be read", tmp_path / "state", "a", "best", out)
    assert not out.exists()


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A model for tables of three columns."""
    folder = tmp_path_factory.mktemp("exported")
    federate(random_silos(folder, {"a": 6, "b": 10}), directory=folder / "run", rounds=1)
    export_model(folder / "run", "a", "last", folder / "m.safetensors")
    return folder / "m.safetensors"


@pytest.mark.exhaustive
def test_a_hospitals_machine_has_no_scipy(exported, tmp_path):
    """The silo's image has the packages of requirements/silo.txt alone."""
    words = [
        "export",
        exported.parent / "run",
        "--silo",
        "a",
        "--out",
        tmp_path / "m.safetensors",
    ]
    code = "import sys; sys.modules['scipy'] = None; from server.cli.main import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        f"{tmp_path / 'm.safetensors'}: fedavg, seed 7, best model of a:"
    )


def refused(reason, *which, **run_id):
    fails(ValueError, reason, export_model, *which, **run_id)


@pytest.mark.parametrize(
    ("arrays", "rows"),
    [
        ({"x": np.zeros((4, 3), np.float32)}, 4),
        ({"x": np.zeros((4, 3), np.float64)}, 4),  # read as float32, as in a silo's file
        ({"x": np.zeros((4, 3), np.float32), "y": np.zeros(4, int)}, 4),
        ({"x_test": np.zeros((2, 3), np.float32)}, 2),
        (
            {
                "train_images": np.zeros((5, 3), np.float32),
                "test_images": np.zeros((2, 3), np.float32),
            },
            2,
        ),
    ],
)
def test_labels_are_not_needed(exported, tmp_path, arrays, rows):
    np.savez(tmp_path / "new.npz", **arrays)
    _, _, p = read_csv(predict_file(exported, tmp_path / "new.npz"))
    assert p.shape == (rows, 3) and np.allclose(p.sum(1), 1, atol=1e-5)


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        (
            {"x": np.zeros((4, 5), np.float32)},
            r"holds float32 samples of shape \(5,\); .* takes float32 of shape \(3,\)",
        ),
        ({"x": np.zeros((4, 8, 8), np.uint8)}, r"holds uint8 samples of shape \(1, 8, 8\)"),
        (
            {"x": np.full((4, 3), np.nan, np.float32)},
            "x has a value that is no finite number, first in sample 0",
        ),
        ({"x": np.zeros((0, 3), np.float32)}, "x holds no samples"),
        ({"x": np.zeros((4, 3), object)}, "Python objects"),
        (
            {"x_train": np.zeros((4, 3), np.float32)},
            "has no samples to predict, but x_train; name them x_test or",
        ),
    ],
)
def test_data_that_do_not_fit(exported, tmp_path, arrays, reason):
    np.savez(tmp_path / "new.npz", **arrays)
    fails(ValueError, reason, predict_file, exported, tmp_path / "new.npz")


def test_models_that_cannot_be_read(exported, tmp_path):
    model = tmp_path / "m.safetensors"
    fails(ValueError, "there is no model", read_model, model)
    model.write_bytes(b"not a model")
    fails(ValueError, "is no exported model, or damaged", read_model, model)
    model.write_bytes(exported.read_bytes())
    fails(ValueError, r"lacks its card m\.safetensors\.json", read_model, model)
    card_file(model).write_text('{"model": {}}')
    with pytest.raises(
        ValueError, match=r"json: the key method is missing; export the model again"
    ):
        read_model(model)
    card = json_of(card_file(exported))
    card_file(model).write_text(json.dumps({**card, "classes": 4}))
    fails(ValueError, r"is of another model than m\.safetensors", read_model, model)


def scaled_silos(folder):
    """Two random silos whose columns lie around 100 and 0.001."""
    files = random_silos(folder, {"a": 6, "b": 10})
    for file in files.values():
        with np.load(file) as data:
            arrays = dict(data)
        for split in ("train", "val", "test"):
            scale, shift = np.array([[10, 1, 0.001], [100, 0, 0]], np.float32)
            arrays[f"x_{split}"] = arrays[f"x_{split}"] * scale + shift
        np.savez(file, **arrays)
    return files


def jumpy_run(folder, **changes):
    """A run whose validation accuracy in silo b rises and falls, and that accuracy round by round."""
    settings = {"rounds": 5, "strategy": "fedavg", "learning_rate": 20.0, **changes}
    run = federate(
        random_silos(folder, {"a": 6, "b": 10}), directory=folder / "run", **settings
    )
    return run, run.values("accuracy", "b", "personal", "val")


def flat(weights):
    """The linear layer as one vector: weights row by row, biases."""
    return torch.cat([weights["fc1.weight"].reshape(-1), weights["fc1.bias"]])


def test_none_of_100_damaged_exports_predicts(exported):
    """The model or its card: what is read is what was exported, or one line says that it is not."""
    for file in (exported, card_file(exported)):
        whole = file.read_bytes()
        for _what, data in damaged(whole, 50):
            file.write_bytes(data)
            fails(ValueError, r"export (it|the model) again", read_model, exported)
        file.write_bytes(whole)
    assert read_model(exported)[0].method


def test_several_inputs_are_predicted_as_the_file_has_them(tmp_path):
    """Whatever the order of the file; a picture of bytes is scaled as in training."""
    rng, n = np.random.default_rng(0), 60
    scan, notes = rng.integers(0, 256, (n, 8, 8), np.uint8), rng.integers(0, 9, (n, 4))
    file, labels = tmp_path / "ours.npz", np.arange(n) % 2
    np.savez(
        file,
        x_scan=scan,
        x_notes=notes,
        x_pulse=rng.normal(size=(n, 1, 16)),
        y=labels,
        vocabulary=np.array(9),
    )
    given = {"silos": 2, "rounds": 1, "validation": 0.2, "fedapm-signals.width": 4}
    run = small_study(tmp_path / "run", file, **given)
    model = tmp_path / "out.safetensors"
    card = export_model(run, "hospital-02", "last", model)
    assert card.input.shape == ["notes tokens 4 9", "pulse 1 16", "scan 1 8 8"]
    index, label, p = read_csv(predict_file(model, file))
    assert index == list(range(n)) and set(label) <= {0, 1} and np.isfinite(p).all()
    with np.load(file) as whole:
        silo = Samples(
            together(
                {
                    name: read_inputs(name, whole[f"x_{name}"], 9)
                    for name in ("scan", "notes", "pulse")
                }
            ),
            labels,
        )
    _, net = read_model(model)
    np.testing.assert_allclose(p, torch.softmax(predict(net, silo), 1).numpy(), rtol=1e-4)
