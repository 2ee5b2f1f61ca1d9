"""A hospital's own trainer: the built-in training's bits for every method that takes one."""

from __future__ import annotations

import locale
import os
from pathlib import Path

import pytest
import torch
from cases import CASES, ONE_OF_EACH, OPTIONS, typical
from failing import fails
from representatives import product
from tiny import comparable, federate, random_silos
from torch.testing import assert_close
from two_layers import DEEP

from models.optimizers import Optimizer
from partitions.common.errors import RunFailedError, UserError
from strategies import strategies
from strategies.base.run_settings import parse_settings

PLAIN = "trainers.plain:train"


@pytest.fixture(autouse=True)
def examples(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "examples")


def count_steps(monkeypatch):
    """Counts the steps of PyTorch's optimiser and of silofl's own, of which APFL's private model alone has some."""
    steps = {"torch": 0, "ours": 0}

    def counted(kind, step):
        def count(self, *given):
            steps[kind] += 1
            return step(self, *given)

        if hasattr(step, "hooked"):  # PyTorch wraps a class's step once, so that it calls hooks
            count.hooked = True  # type: ignore[attr-defined]
        return count

    monkeypatch.setattr(torch.optim.SGD, "step", counted("torch", torch.optim.SGD.step))
    monkeypatch.setattr(Optimizer, "step", counted("ours", Optimizer.step))
    return steps


@typical(ONE_OF_EACH, "method")
def test_a_plain_loop_gives_the_built_in_trainings_bits(method, tmp_path, tiny_bn, monkeypatch):
    """Every row of the history, and every silo's own model; or the method refuses trainers, with its reason."""
    files = random_silos(tmp_path, [13, 9, 11])
    own = CASES[ONE_OF_EACH[method]][0].items()
    changes = {key.replace("-", "_").replace(".", "__"): value for key, value in own}
    options = {**DEEP, **OPTIONS, "momentum": 0.0, "optimizer_state": "reset"}
    options |= {**changes, "rounds": 3}
    info = strategies()[method].info
    if not info.training.trainer:
        with pytest.raises(UserError, match=f"trainer = {PLAIN}: not with {method}: "):
            federate(files, **options, trainer=PLAIN)
        return
    built_in = federate(files, **options)
    steps = count_steps(monkeypatch)
    by_trainer = federate(files, **options, trainer=PLAIN)
    assert steps["torch"] and not (steps["ours"] and method != "apfl")
    assert comparable(built_in.rows) == comparable(by_trainer.rows)
    for silo in files:
        assert torch.equal(built_in.personal(silo), by_trainer.personal(silo))


BASE = {**DEEP, "batch_size": 4, "local_epochs": 2, "learning_rate": 0.1, "rounds": 2}


def go(tmp_path, trainer, **changes):
    files = random_silos(tmp_path, [13, 9])
    name = f"own_trainers:{trainer}" if trainer else ""
    return federate(files, **{**BASE, **changes}, trainer=name)


def models(run):
    return [run.personal(silo) for silo in "ab"]


@product(
    trainer=["closure", "moves", "thaws", "own_optimizer", "leaves_hooks"],
    method=["scaffold", "fedrep", "ditto"],
)
def test_any_loop_over_the_batches_is_the_built_in_training(trainer, method, tmp_path):
    built_in, by_trainer = (models(go(tmp_path, t, strategy=method)) for t in ("", trainer))
    assert all(map(torch.equal, built_in, by_trainer))


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_the_tasks_optimizer_is_the_runs(optimizer, tmp_path):
    changes = {"optimizer": optimizer, "weight_decay": 0.1, "momentum": 0.5, "amsgrad": True}
    changes["learning_rate"] = 0.01
    built_in, by_trainer = (models(go(tmp_path, t, **changes)) for t in ("", "own_optimizer"))
    for one, other in zip(built_in, by_trainer, strict=True):
        assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "trainer, said",
    [
        ("forgets", "it made no step with an optimizer that task.attach was given"),
        ("twice", "task.attach was called twice"),
        ("foreign", "its optimizer has 1 tensors that are no parameters of task.network"),
        ("fails", r"RuntimeError: first line second line \(.*own_trainers.py, line 6\d\)"),
        ("leaves", "SystemExit: 3"),
        ("nowhere", r"task.loader\('validation'\): train, val or test is needed here"),
        ("missing", "own_trainers defines no function missing"),
        ("replaces", r"it replaced \S+.weight of task.network, or changed its size"),
        ("parametrises", "its optimizer has 2 tensors that are no parameters of task.network"),
        ("widens", r"it replaced \S+.weight of task.network, or changed its size"),
        ("leaves_device", r"it replaced \S+ of task.network, or changed its size"),
        ("returns_text", "it returned str: return the mean loss, or nothing"),
    ],
)
def test_a_trainers_fault_is_one_line_of_the_silo(trainer, said, tmp_path):
    with pytest.raises(
        RunFailedError, match=rf"a: trainer = \S*own_trainers:{trainer}.*{said}"
    ):
        go(tmp_path, trainer, strategy="fedprox")


def test_a_trainer_leaves_the_process_as_it_was(tmp_path, monkeypatch):
    """Working directory, variables and locale: all paths of the run, and its threads, depend on them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(locale, "setlocale", Locale())
    before = Path.cwd(), dict(os.environ), locale.setlocale(locale.LC_ALL)
    go(tmp_path, "wanders")
    assert before == (Path.cwd(), dict(os.environ), locale.setlocale(locale.LC_ALL))


class Locale:
    """The C library's, with a language that may not be installed here."""

    current = "de_DE.UTF-8"

    def __call__(self, category: int, value: str | None = None) -> str:
        self.current = value or self.current
        return self.current


def test_apfl_says_that_it_needs_the_loaders_batches(tmp_path):
    with pytest.raises(RunFailedError, match="apfl needs the batch of each step"):
        go(tmp_path, "copies", strategy="apfl")


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"trainer": "no function"}, "trainer = 'no function': package.module:function"),
        ({"dp": True}, "dp = true: not with trainer"),
        ({"accumulate": 2}, "accumulate = 2 is its own to do"),
        ({"clip-gradient": 1.0}, "clip-gradient = 1.0 is its own to do"),
        ({"warmup-batches": 2}, "warmup-batches = 2 is its own to do"),
        ({"optimizer-state": "keep"}, "optimizer-state = keep is its own to do"),
        ({"precision": "fp16"}, "precision = fp16 is its own to do"),
        ({"strategy": "fedproto"}, "not with fedproto: its loss is not the run's alone"),
        ({"strategy": "apple"}, "not with apple: it takes gradients at models"),
    ],
)
def test_a_setting_that_would_do_nothing_is_refused(changes, said):
    fails(UserError, said, parse_settings, {"trainer": PLAIN, **changes})


def test_a_method_that_ends_a_training_itself_refuses(tmp_path):
    with pytest.raises(RunFailedError, match="fedapm ends a training by a rule of its own"):
        go(tmp_path, "own_optimizer", strategy="fedapm", fedapm__accuracy=1e-3)


@pytest.mark.exhaustive
def test_a_resumed_run_and_a_newcomer_are_trained_by_it(tmp_path):
    """Three rounds at once, or two and one more: the same rows; and the newcomer's model is the built-in training's."""
    changes = {"strategy": "ditto", "hold_out": "c", "hold_out_epochs": 1}
    files = random_silos(tmp_path, [13, 9, 8])
    options = {**BASE, **changes, "rounds": 3}
    built_in = federate(files, **options)
    options["trainer"] = "own_trainers:closure"
    whole = federate(files, **options)
    folder = tmp_path / "run"
    federate(files, **{**options, "rounds": 2}, directory=folder)
    resumed = federate(files, **options, directory=folder, resume=True)
    drop = ("round_seconds", "loss")  # of training, which this trainer does not return
    assert comparable(whole.rows, without=drop) == comparable(built_in.rows, without=drop)
    assert comparable(resumed.rows) == comparable(whole.rows)
