"""What holds for every method that is registered: bytes, what leaves a silo, what is never written to, resume, absence.

A method that is added must be entered in CASES (``tests/helpers/cases.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from cases import (
    BODY,
    CASES,
    ENSEMBLE,
    FULL,
    GAUSSIAN,
    HEAD,
    NEW_TREES,
    OPTIONS,
    PAC,
    POLICY,
    POOLED,
    SIMPLEX,
    TABLE,
    VALVE,
    WITH_ALA,
    K,
    every,
    typical,
)
from resuming import assert_equal, crash_after, interrupted
from study_text import TEXTS
from tiny import Witness, federate, random_silos, round_of, same, settings_of
from two_layers import DEEP, replies_of, waits

from client.site.study import approvals
from server.deploy.study_draft import draft
from server.run.reporter import Progress
from strategies import strategies
from strategies.base.transport.payload import array_record
from strategies.base.transport.reporting import allowed_metrics

# What a word of ``sends`` may come to here, from round 2 on; either layer of the two can be the shared one.
UNITS = {
    "Σ": {FULL, ENSEMBLE, 41},  # FedEx-LoRA's: with A, B and R for fc1
    "its new trees": {NEW_TREES},
    "M Σ": {2 * FULL},
    "2 Σ": {2 * FULL},
    "k Σ": {2 * FULL},
    # FedSA-LoRA's: A of rank 2; FedEx-LoRA's: without R
    "Σ_s": {BODY, HEAD, SIMPLEX, 6, 29},
    "Σ_s + M": {SIMPLEX + 2},
    "0": {0},
    "≤ Σ": set(range(FULL + 1)),
    "p Σ": set(range(FULL + 1)),
    "Σ + Σ/8": {FULL + 4},
    "d": {5},
    "Σ - Σ_bn": {FULL},
    "C (K + 1)": {TABLE},
    "C (K + 1) + K (K + 1)/2": {POOLED},
    "Σ + K": {FULL + K},
    "Σ + 2K² + 6K": {POLICY},
    "Σ + C (K + 1)": {FULL + TABLE},
    "Σ + C (2K + 1)": {PAC},
    "Σ + 2L (K + 1)": {FULL, FULL + 2 * TABLE},  # FedMLP's: Σ down where there are no findings
    "Σ_s + 2CK": {FULL + 18},
    "Σ_s + 2C": {FULL + 6},
    "Σ_s + CK + 2K² + 6K": {VALVE},
    "Σ_s + CK + K (K + 1)/2": {GAUSSIAN},
}


def flows(flow, silo):
    return flow[silo] if isinstance(flow, Mapping) else flow


def scalars(flow, silo, server_round):
    """What flows to or from this silo in this round."""
    own = flows(flow, silo)
    return own[min(server_round, len(own)) - 1]


def rounds_of(*both):
    """Three, or as many as the numbers say."""
    return max(3, *(len(flow) - 1 for flow in both if not isinstance(flow, Mapping)))


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
    """The run of a case, of which several tests look at another side."""
    three = random_silos(tmp_path_factory.mktemp("three"), [6, 10, 8])

    @functools.cache
    def run(name):
        settings, down, up = (CASES | WITH_ALA)[name]
        return federate(three, **{**DEEP, **OPTIONS, **settings}, rounds=rounds_of(down, up))

    return run


def test_every_method_is_here():
    assert {settings["strategy"] for settings, _, _ in CASES.values()} == {
        name for name, method in strategies().items() if not method.info.role.pooled
    }


@every(CASES)
def test_bytes_are_the_stated_units(three, run_of, name, tiny_bn):
    """Four bytes a scalar for each of three silos, every round and in the closing exchange; as ``sends`` declares."""
    settings, down, up = CASES[name]
    rounds, run = rounds_of(down, up), run_of(name)
    for way, flow, last in (("down", down, rounds + 1), ("up", up, rounds)):
        expected = [
            4 * sum(scalars(flow, silo, r) for silo in three) for r in range(1, last + 1)
        ]
        assert run.values(f"bytes_{way}") == expected + [0] * (rounds + 1 - last)
        if name == settings["strategy"]:
            unit = UNITS[run.strategy.info.sends[way == "up"]]
            assert all(
                set(own[1:] or own) <= unit for own in (flows(flow, silo) for silo in three)
            )


# No network of the app for tables has FedBN's layers
@typical([name for name in CASES if "," not in name and name != "fedbn"])
def test_no_message_of_a_run_is_refused_under_its_own_draft(tmp_path, name):
    """Three hospitals that require studies have approved what `silofl study new` drafts of the run."""
    files = random_silos(tmp_path, [60, 60, 60])
    values: dict[str, Any] = {"strategy": name, "study": "trial", "rounds": 6, "batch_size": 10}
    values |= {"model": "mlp", "mlp.hidden": "8", "evaluate_every": 2, "learning_rate": 0.05}
    if name.endswith("-lora"):
        values["lora_rank"] = 2
    if strategies()[name].info.training.trees == "only":
        values |= {"model": "trees"}
        del values["mlp.hidden"]
    apps, data = ["0" * 64], {"shape": (3,), "classes": 3, "task": "multiclass"}
    flat = settings_of(files, **values).flat()
    text = draft("trial", flat, texts=TEXTS, end=None, apps=apps, data=data)
    (state := tmp_path / "state").mkdir()
    for silo in files:
        approvals.record_approval(state, silo, text, "Dr. B", "", [])
    allowed = [f"{key} = true" for key in ("class-means", "peers", "own-model")]
    lines = ['studies = "required"', f"methods = ['{name}']", *allowed]
    (policy := tmp_path / "policy.toml").write_text("\n".join(lines))
    seen: list[Progress] = []
    federate(files, policy=str(policy), state_dir=state, watch=seen.append, **values)
    assert len(seen) == 6 and not any(of.rejected for of in seen)


@every(CASES | WITH_ALA)
def test_only_what_is_declared_leaves_a_silo(run_of, name, tiny_bn):
    """The declared vectors of the stated size, numbers and metrics, and nothing else."""
    _, down, up = (CASES | WITH_ALA)[name]
    rounds, run = rounds_of(down, up), run_of(name)
    info = run.strategy.info
    replies = replies_of(run)
    assert len(replies) == 3 * rounds
    for server_round, silo, payload, reply in replies:
        names = run.strategy.upload_names()
        assert list(payload.models) == list(names) and {*names} <= {*info.uploads}
        assert sum(m.vector.numel() for m in payload.models.values()) == scalars(
            up, silo, server_round
        )
        assert set(payload.numbers) <= set(info.sends_numbers)
        assert set(reply.content["config"]) == {
            "manifest",
            "round",
            "silo",
            "samples",
            *(f"number.{k}" for k in payload.numbers),
        }
        assert set(reply.content) == {*(f"model.{n}" for n in names), "config", "metrics"}
        assert set(reply.content["metrics"]) <= allowed_metrics()


def test_the_hospital_is_told_whose_models_travel(run_of, tiny_bn):
    """A personal model that the silo sent, in any round, is declared (docs/attacks.md), and no other.

    FedRDN's is sent in two vectors.
    """
    sent = set()
    for name, (settings, _, _) in CASES.items():
        run = run_of(name)
        own = run.personal("a")
        if any(
            same(m.vector, own)
            for _, _, payload, _ in replies_of(run, "a")
            for m in payload.models.values()
        ):
            sent.add(settings["strategy"])
    assert sent | {"fedrdn", "pooled"} == {
        name for name, method in strategies().items() if method.info.own_model == "sent"
    }


@typical(CASES | WITH_ALA)
def test_nothing_that_goes_by_is_written_to(three, name, tiny_bn):
    """In one process tensors travel uncopied: a write would reach other silos, the server, or a saved state."""
    witness = Witness()
    settings = {
        "model": "tiny-bn",
        **OPTIONS,
        **(CASES | WITH_ALA)[name][0],
        "participation": 0.7,
    }
    run = federate(three, **settings, rounds=3, prepare=witness)
    witness.remember(array_record(run.held))
    witness.confirm(more_than=20)


@typical(CASES | WITH_ALA)
def test_a_resumed_run_is_an_uninterrupted_one(three, tmp_path, name, tiny_bn):
    """Stopped after round 2 of 4, resumed from files: history, server's state and silos' states bit for bit.

    With BatchNorm, momentum that is kept over rounds, and two of three silos a round. Whoever does not take part
    keeps its personal model, and reports it as it was.
    """
    settings = {
        "model": "tiny-bn",
        **OPTIONS,
        **(CASES | WITH_ALA)[name][0],
        "participation": 0.7,
        "rounds": 4,
    }
    whole = federate(three, directory=tmp_path / "whole", **settings)
    interrupted(three, tmp_path / "parts", watch=crash_after(2), **settings)
    resumed = federate(three, directory=tmp_path / "parts", resume=True, **settings)
    assert {round_of(m) for m, _ in resumed.grid.traffic} == {0, 3, 4, 5}
    assert_equal(whole, resumed, (tmp_path / "whole", tmp_path / "parts"))

    assert sum(len(waits(whole, silo, "val")) for silo in three) > 2


@pytest.mark.parametrize("name", CASES)
def test_the_personal_model_is_kept_and_another_for_every_silo(run_of, name, tiny_bn):
    """Each silo ends with a model of its own, finite, which its metrics are of. (Equal seeds: the resumed runs.)

    Of kNN-Per the network is the shared one; what is the silo's own is what votes beside it.
    """
    models = [run_of(name).personal(silo) for silo in ("a", "b", "c")]
    assert all(bool(torch.isfinite(model).all()) for model in models)
    alike = [same(models[i], models[j]) for i, j in ((0, 1), (0, 2), (1, 2))]
    assert alike == [name == "knn-per"] * 3
