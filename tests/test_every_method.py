"""What holds for every method that is registered: bytes, what leaves a silo, what is never written to, resume, absence.

A method that is added must be entered in CASES, with settings under which it does what sets it apart.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, Message
from test_resume import assert_equal, crash_after, interrupted
from tiny import Files, TinyGrid, federate, round_of, same
from torch import Tensor
from two_layers import DEEP, replies_of, rounds_trained

from strategies import strategies
from strategies.payload import array_record, tensor_of
from strategies.reports import allowed_metrics

FULL, BODY, HEAD = 31, 16, 15  # Σ, fc1 and fc2 of the network in two_layers.py; by default fc2 is personal
Flow = tuple[int, int]  # scalars down in round 1, and in every later one


def case(
    strategy: str, down: Flow = (FULL, FULL), up: Flow = (FULL, FULL), **changes: Any
) -> tuple[dict[str, Any], Flow, Flow]:
    own = {k if "." in k else f"{strategy}.{k.rstrip('_').replace('_', '-')}": v for k, v in changes.items()}
    return {"strategy": strategy, **own}, down, up


ALA: dict[str, Any] = {"fedala.max-epochs": 2, "fedala.eta": 5.0, "fedala.layers": 2}
PART: dict[str, Flow] = {"down": (BODY, BODY), "up": (BODY, BODY)}
LATER: dict[str, Flow] = {"down": (0, FULL)}  # nothing in a silo's first round
CUT: dict[str, Flow] = {"down": (FULL, BODY), "up": (FULL, BODY)}
CASES: dict[str, tuple[dict[str, Any], Flow, Flow]] = {
    "apfl": case("apfl", adapt="batch"),
    "apfl, logits": case("apfl", mix="logits"),
    "apple": case("apple", down=(3 * FULL, 2 * FULL), dr_learning_rate=0.1, prox_share=1.0, mu=1.0),
    "apple, budget": case("apple", down=(3 * FULL, FULL), dr_learning_rate=0.1, max_downloads=1),
    "ditto": case("ditto", lambda_=0.5),
    "diversifed": case("diversifed", **LATER),
    "fedala": case("fedala", **ALA),
    "fedalt": case("fedalt", **PART),
    "fedamp": case("fedamp", **LATER, sigma=2.0, step=1.0),
    "fedapm": case("fedapm", **PART, rho=0.2),
    "fedapm, input, accuracy": case(
        "fedapm", (HEAD, HEAD), (HEAD, HEAD), personal="input", rho=0.2, accuracy=1e-3, alpha="samples"
    ),
    "fedavg": case("fedavg"),
    "fedavg-ft": case("fedavg-ft", epochs=2),
    "fedfomo": case("fedfomo", down=(0, 2 * FULL)),
    "fedfomo, budget": case("fedfomo", **LATER, max_downloads=1, epsilon=0.5),
    "fedper": case("fedper", **PART),
    "fedprox": case("fedprox", mu=0.5),
    "fedprox-ft": case("fedprox-ft", mu=0.5),
    "fedrep": case("fedrep", **PART, head_epochs=2),
    "fedsim": case("fedsim", **PART),
    "heurfedamp": case("heurfedamp", **LATER, sigma=3.0),
    "local": case("local", (0, 0), (0, 0)),
    "per-fedavg": case("per-fedavg", step=0.2),
    "per-fedavg, hf": case("per-fedavg", variant="hf", step=0.2, delta=0.1),
    "pfedme": case("pfedme", beta=0.7, lambda_=3.0),
    "player-fl": case("player-fl", **CUT, threshold=1.0),
    "player-fl-random": case("player-fl-random", (FULL, BODY), (FULL, BODY), threshold=1e9),
}
WITH_ALA = {f"{name} with ALA": ({**CASES[name][0], **ALA, "ala": True}, *CASES[name][1:])
            for name in ("fedavg", "ditto", "fedapm", "player-fl", "heurfedamp", "apfl, logits")}  # fmt: skip
OPTIONS: dict[str, Any] = {"local_epochs": 2, "batch_size": 4, "learning_rate": 0.1, "momentum": 0.9,
                           "optimizer_state": "keep"}  # fmt: skip
UNITS: Mapping[str, int] = {"Σ": FULL, "M Σ": 2 * FULL, "Σ_s": BODY, "0": 0}


def every(cases: Mapping[str, Any]) -> Any:
    return pytest.mark.parametrize("name", cases)


def test_every_method_is_here() -> None:
    assert {settings["strategy"] for settings, _, _ in CASES.values()} == set(strategies())


@every(CASES)
def test_bytes_are_the_stated_units(three: Files, name: str) -> None:
    """Four bytes a scalar for each of three silos, every round and in the closing exchange; as ``sends`` declares."""
    settings, down, up = CASES[name]
    run = federate(three, **settings, **{**DEEP, **OPTIONS}, rounds=3)
    assert run.values("bytes_down") == [3 * 4 * n for n in (down[0], down[1], down[1], down[1])]
    assert run.values("bytes_up") == [3 * 4 * n for n in (up[0], up[1], up[1], 0)]
    if name == settings["strategy"]:
        assert [UNITS[unit] for unit in run.strategy.sends] == [down[1], up[1]]


@every(CASES | WITH_ALA)
def test_only_what_is_declared_leaves_a_silo(three: Files, name: str) -> None:
    """The declared vectors of the stated size, numbers and metrics, and nothing else."""
    settings, _, up = (CASES | WITH_ALA)[name]
    run = federate(three, **settings, **{**DEEP, **OPTIONS}, rounds=3)
    client = run.strategy.client
    replies = replies_of(run)
    assert len(replies) == 9
    for server_round, _, payload, reply in replies:
        size = up[0] if server_round == 1 else up[1]
        assert [(n, m.vector.numel()) for n, m in payload.models.items()] == [
            (n, size) for n in client.uploads
        ]
        assert set(payload.numbers) <= set(client.sends_numbers)
        assert set(reply.content["config"]) == {  # type: ignore[call-overload]
            "manifest", "round", "silo", "samples", *(f"number.{k}" for k in payload.numbers)
        }  # fmt: skip
        assert set(reply.content) == {*(f"model.{n}" for n in client.uploads), "config", "metrics"}
        assert set(reply.content["metrics"]) <= allowed_metrics()


def test_the_hospital_is_told_whose_models_travel(three: Files) -> None:
    """docs/hospital.md names the methods whose personal model is what the silo sent, and those alone."""
    sent = (
        set()
    )  # with other local epochs than fedavg-ft's, whose fine-tuning would else be the local training
    for settings, _, _ in CASES.values():
        run = federate(three, **settings, **{**DEEP, **OPTIONS, "local_epochs": 3}, rounds=2)
        own = run.personal("a")
        if any(
            same(m.vector, own) for _, _, payload, _ in replies_of(run, "a") for m in payload.models.values()
        ):
            sent.add(settings["strategy"])
    text = (Path(__file__).parents[1] / "docs" / "hospital.md").read_text()
    told = text.split("Whether anyone else has this model")[1].split("it is what the silo sent")[0]
    assert set(re.findall(r"`([a-z-]+)`", told)) == sent


@every(CASES | WITH_ALA)
def test_nothing_that_goes_by_is_written_to(three: Files, name: str, tiny_bn: None) -> None:
    """In one process tensors travel uncopied: a write would reach other silos, the server, or a saved state.

    Every tensor of a message, a reply, a silo's state and the server's is remembered with its values.
    """
    remembered: list[tuple[Tensor, Tensor, int]] = []

    def remember(*records: Any) -> None:
        for tensor in (tensor_of(array) for record in records for array in record.values()):
            remembered.append((tensor, tensor.clone(), tensor._version))

    def before(silo: str, message: Message, context: Context) -> None:
        remember(*message.content.array_records.values())
        if "arrays" in context.state:
            remember(context.state["arrays"])

    def after(silo: str, message: Message, reply: Message) -> Message:
        remember(*reply.content.array_records.values())
        return reply

    def prepare(grid: TinyGrid) -> None:
        grid.before, grid.after = before, after

    settings = {**(CASES | WITH_ALA)[name][0], **OPTIONS, "model": "tiny-bn", "participation": 0.7}
    run = federate(three, **settings, rounds=4, prepare=prepare)
    remember(array_record(run.strategy.state.arrays))
    assert len(remembered) > 20
    for tensor, values, version in remembered:
        assert torch.equal(tensor, values)
        assert tensor._version == version


@every(CASES | WITH_ALA)
def test_a_resumed_run_is_an_uninterrupted_one(
    three: Files, tmp_path: Path, name: str, tiny_bn: None
) -> None:
    """Stopped after round 3 of 5, resumed from files: history, server's state and silos' states bit for bit.

    With BatchNorm, momentum that is kept over rounds, and two of three silos a round. Whoever does not take part
    keeps its personal model, and reports it as it was.
    """
    settings = {
        **(CASES | WITH_ALA)[name][0],
        **OPTIONS,
        "model": "tiny-bn",
        "participation": 0.7,
        "rounds": 5,
    }
    whole = federate(three, directory=tmp_path / "whole", **settings)
    interrupted(three, tmp_path / "parts", watch=crash_after(3), **settings)
    resumed = federate(three, directory=tmp_path / "parts", resume=True, **settings)
    assert {round_of(m) for m, _ in resumed.grid.traffic} == {0, 4, 5, 6}
    assert_equal(whole, resumed, (tmp_path / "whole", tmp_path / "parts"))

    absences = 0
    for silo in three:
        trained = rounds_trained(whole, silo)
        losses = {r.round: r.value for r in whole.rows
                  if (r.silo, r.snapshot, r.split, r.metric) == (silo, "personal", "val", "loss")}  # fmt: skip
        for server_round in range(2, 6):
            if server_round not in trained:
                assert losses[server_round] == losses[server_round - 1]
                absences += 1
    assert absences > 2


@every(CASES)
def test_the_personal_model_is_kept_and_another_for_every_silo(three: Files, name: str) -> None:
    """Each silo ends with a model of its own, finite, which its metrics are of; with equal seeds the same again."""
    settings = {**CASES[name][0], **DEEP, **OPTIONS, "rounds": 3}
    first, second = (federate(three, **settings) for _ in range(2))
    models = [first.personal(silo) for silo in three]
    assert all(bool(torch.isfinite(model).all()) for model in models)
    assert not any(same(models[i], models[j]) for i, j in ((0, 1), (0, 2), (1, 2)))
    assert all(same(first.personal(silo), second.personal(silo)) for silo in three)
