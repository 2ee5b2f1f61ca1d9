"""Silos on a real GPU, where this machine has one: the CPU's numbers, number formats, and what a GPU refuses.

What needs no GPU is in `test_device.py`. Its stand-in takes a GPU's place in PyTorch, so a process has one of the two:
`pytest tests/server/run/test_cuda.py` by itself. On a machine without a GPU each test here is skipped.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import CASES, OPTIONS
from hospitals import NETWORKS, hospital_files
from tiny import federate, forget_models, random_silos, simulated
from two_layers import DEEP

from client.protocol.node import Site
from client.site.runtime.doctor import device_check
from models import graphs
from server.results.history import Row
from strategies.base.settings import RULES

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
EXACT = {"device": "cuda", "tf32": "off"}


def losses(rows: list[Row]) -> list[float]:
    return [row.value for row in rows if row.metric == "loss" and row.value is not None]


def same_there(files: Any, rel: float, **options: Any) -> None:
    """Compare a run's losses on the GPU with the CPU's."""
    on_cpu = losses(federate(files, **options).rows)
    there = losses(federate(files, **{**options, **EXACT}).rows)
    assert on_cpu and there == pytest.approx(on_cpu, rel=rel)


# Their noise is drawn on the GPU, by its own generator; XGBoost computes on the CPU.
OTHERS = [name for name in sorted(CASES) if not name.startswith(("fedcp", "floco", "fedxgb"))]


@pytest.mark.parametrize("case", OTHERS)
def test_every_method_gives_the_losses_of_the_cpu(tmp_path, case, tiny_bn):
    own = {k.replace("-", "_").replace(".", "__"): v for k, v in CASES[case][0].items()}
    files = random_silos(tmp_path, {"a": 9, "b": 12, "c": 8}, columns=4)
    same_there(files, 1e-3, **{**DEEP, **OPTIONS, "rounds": 2, **own})


@pytest.mark.parametrize("made", sorted(NETWORKS))
def test_every_task_gives_the_losses_of_the_cpu(tmp_path, made):
    own = {"rounds": 1, "normalization": "agreed", **NETWORKS[made]}
    same_there(hospital_files(tmp_path, made), 5e-3, strategy="fedavg", **own)


@pytest.mark.parametrize("rule", ["screen", "clip", *RULES])
def test_every_robust_rule_gives_the_losses_of_the_cpu(tmp_path, rule):
    files = random_silos(tmp_path, {"a": 9, "b": 12, "c": 8}, columns=4)
    own = {"rounds": 2, "batch_size": 4, "robust": rule, "robust_attackers": 0}
    same_there(files, 1e-3, strategy="fedavg", **{**DEEP, **own})


def digits(**options: Any) -> list[Row]:
    return simulated(silos=2, rounds=2, dataset="digits", **options).history.rows


@pytest.mark.parametrize("model", ["resnet8", "small-cnn", "mlp", "vit-s"])
def test_a_deterministic_run_repeats_its_bits(model):
    options: dict[str, Any] = {"model": model, "device": "cuda", "deterministic": True}
    options |= {"vit_s.patch": 4} if model == "vit-s" else {}
    first, again = (losses(digits(strategy="fedala", **options)) for _ in range(2))
    assert first and first == again


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("model", ["resnet8", "small-cnn", "mlp"])
@pytest.mark.parametrize("strategy", ["fedavg", "apple", "ditto", "fedrep", "scaffold"])
def test_graphs_give_the_bits_of_single_steps(model, precision, strategy, monkeypatch):
    """A gradient that is replayed is the one that Python asks for step by step; each kind of batch has its graph."""
    options: dict[str, Any] = {"model": model, "precision": precision, "local_epochs": 2}
    options |= {"strategy": strategy, "device": "cuda", "deterministic": True}
    monkeypatch.setattr(graphs, "EAGER", 10**9)
    forget_models()
    by_step = digits(**options)
    made: list[int] = []
    replay = graphs.GradientGraph.replay

    def counted(own: graphs.GradientGraph, x: Any, y: Any) -> Any:
        made.append(id(own))
        return replay(own, x, y)

    monkeypatch.setattr(graphs.GradientGraph, "replay", counted)
    monkeypatch.setattr(graphs, "EAGER", 1)
    forget_models()
    assert losses(digits(**options)) == losses(by_step) and len(made) > len(set(made))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("model", ["resnet8", "small-cnn", "mlp"])
def test_mixed_precision_is_near_float32(model, precision):
    options: dict[str, Any] = {"strategy": "fedavg", "model": model, **EXACT}
    options |= {"optimizer": "sgd", "optimizer_state": "reset", "learning_rate": 0.001}
    exact = losses(digits(**options))
    assert losses(digits(precision=precision, **options)) == pytest.approx(exact, rel=0.03)


def test_private_training_is_there(tmp_path):
    files = random_silos(tmp_path, {"a": 9, "b": 12, "c": 8}, columns=4)
    options: dict[str, Any] = {"dp": True, "dp__noise_multiplier": 1.0, "dp__clip_norm": 1.0}
    options |= {**DEEP, "strategy": "fedavg", "rounds": 2, "batch_size": 4, "device": "cuda"}
    found = federate(files, state_dir=tmp_path / "state", directory=tmp_path / "run", **options)
    assert {row.silo for row in found.rows} >= set(files)


def test_the_doctor_names_the_gpu_that_computes(tmp_path):
    check = device_check(Site("a", "b:1", tmp_path, tmp_path, tmp_path, tmp_path, "cuda:0"))
    assert check.ok and torch.cuda.get_device_name(0) in check.detail
    none = f"cuda:{torch.cuda.device_count()}"
    assert not device_check(Site("a", "b:1", tmp_path, tmp_path, tmp_path, tmp_path, none)).ok


def test_memory_beyond_the_share_is_named(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("SILOFL_GPU_SHARE", "0.0001")
    files = random_silos(tmp_path, {"a": 9, "b": 12, "c": 8}, columns=4)
    try:
        wide = {**DEEP, "mlp__hidden": "4000,4000", "device": "cuda"}
        with pytest.raises(Exception, match="out of memory on the GPU"):
            federate(files, strategy="fedavg", rounds=1, **wide)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
