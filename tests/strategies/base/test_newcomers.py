"""What a hospital gets that a run holds out, for every method: as declared, and without a trace in the others' run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from cases import CASES, OPTIONS, WITH_ALA, typical
from tiny import comparable, federate, random_silos, same
from torch import Tensor
from two_layers import DEEP, replies_of

from strategies import strategies
from strategies.base.newcomers import evaluate_newcomer
from strategies.base.partial import head_blocks
from strategies.base.transport.payload import decode

HELD = "b"
EVERY = CASES | WITH_ALA | {"pooled": ({"strategy": "pooled"}, (), ())}
# Blocks of the model, or parts of one, that a newcomer of these methods trains; of partial methods: what is personal.
OWN = {
    "fedpac": lambda client: [client.model.head],
    "fedrod": lambda client: [client.model.head],
    "fedrdn": lambda client: [],
    "floco": lambda client: [],
    "feddbe": lambda client: [
        slice(s.start, s.stop) for s in client.model.layout.linear_head()[1:]
    ],
    "fedcp": lambda client: list(
        client.model.layout.parts(head_blocks(client.model.layout, "own"))
    ),
    "gpfl": lambda client: list(
        client.model.layout.parts(head_blocks(client.model.layout, "own"))
    ),
}


class SeenByNewcomer:
    """What was evaluated of the newcomer, by snapshot, and its client."""

    def __init__(self, monkeypatch):
        self.models: dict[str, Tensor] = {}

        def evaluate(client, config):
            measure, self.client = client.measure, client

            def watch(snapshot, vector):
                self.models[snapshot] = vector.clone()
                return measure(snapshot, vector)

            client.measure = watch
            return evaluate_newcomer(client, config)

        monkeypatch.setattr("client.app.evaluate_newcomer", evaluate)

    @property
    def start(self):
        return self.models["received"]

    @property
    def own(self):
        return self.models["personal"]


@pytest.fixture
def four(tmp_path):
    return random_silos(tmp_path, {"a": 6, HELD: 10, "c": 8, "d": 7})


def run_with(files, settings, **changes):
    given = {
        **DEEP,
        **OPTIONS,
        **settings,
        "rounds": 3,
        "evaluate_every": 3,
        "hold_out": HELD,
        **changes,
    }
    return federate(files, **given)


def only(rows):
    """What a run has of all but the newcomer, without how many bytes and seconds."""
    return comparable([r for r in rows if r.silo not in ("", HELD)])


# With one β the newcomer's is 0 here: its head is the received one
@typical([name for name in EVERY if name not in ("pooled", "pfedfda, one")])
def test_a_newcomer_gets_what_its_method_declares(four, name, tiny_bn, monkeypatch):
    """And the others' run is bit for bit that of a federation without it."""
    settings, seen = EVERY[name][0], SeenByNewcomer(monkeypatch)
    run = run_with(four, settings)
    kinds = {r.snapshot for r in run.rows if r.silo == HELD}
    assert kinds == {"zero_shot", "personalised"}
    assert {r.round for r in run.rows if r.silo == HELD} == {4}
    sent = [
        (m, r) for m, r in run.grid.traffic if run.grid.name_of(m.metadata.dst_node_id) == HELD
    ]
    assert [m.metadata.message_type for m, _ in sent] == ["query", "evaluate"]
    message, reply = sent[1]
    assert not decode(reply.content)[0].models and not decode(reply.content)[0].numbers
    assert "arrays" not in next(
        c.state for c in run.grid.contexts.values() if c.node_config["name"] == HELD
    )
    check_kind(
        strategies()[settings["strategy"]],
        run,
        seen,
        {k: m.vector for k, m in decode(message.content)[0].models.items()},
    )
    without = run_with({n: f for n, f in four.items() if n != HELD}, settings, hold_out="")
    assert only(run.rows) == only(without.rows)


def check_kind(method, run, seen, got):
    kind, start, own, name = method.info.newcomer, seen.start, seen.own, method.info.name
    moved = ~torch.isclose(start, own, rtol=0, atol=0)
    initial = seen.client.silo.initial("")
    if kind == "model":
        # GH-OFL's is a head above the body of the seed
        whole = [torch.cat([initial[: len(start) - len(m)], m]) for m in got.values()]
        assert any(same(start, model) for model in whole) and same(own, start)
    elif kind == "copy":
        assert same(start, got["global"]) and bool(moved.any())
    elif kind == "layers":
        mask = torch.zeros_like(moved)
        parts = OWN[name](seen.client) if name in OWN else seen.client.private
        for part in parts:
            mask[part] = True
        assert bool(moved.any()) == bool(mask.any()) and not bool((moved & ~mask).any())
        if len(got["global"]) == len(start) and name != "fedapm":
            assert same(start[~mask], got["global"][~mask])
    elif kind == "mixture":
        silos = [
            p.models["model"].vector
            for r, s, p, _ in replies_of(run)
            if r == run.federation.state.newcomers.round - 1
        ]
        assert len(silos) == 3
        base = torch.stack([v - silos[0] for v in silos[1:]], 1).double()
        found = torch.linalg.lstsq(
            base, (start - silos[0]).double()[:, None], driver="gelsd"
        ).solution
        assert float((base @ found - (start - silos[0])[:, None]).abs().max()) < 1e-5
        assert bool(moved.any())
    else:
        assert kind == "own" and bool(moved.any())
        last = seen.client.model.head
        keep = torch.ones_like(moved)
        # Its last layer finds the nearest of the received prototypes
        keep[last] = name != "fedproto"
        assert same(start[keep], initial[keep])


def test_every_method_declares_its_newcomers():
    assert {name for name, method in strategies().items() if not method.info.newcomer} == set()
    assert {settings["strategy"] for settings, *_ in EVERY.values()} == set(strategies())


@typical([n for n in EVERY if n not in ("pooled", "fedfomo", "fedproto")])
def test_no_epochs_leave_the_model_that_arrived(name, four, tiny_bn, monkeypatch):
    """FedFomo weighs models before it trains, FedEM, FedProto and pFedFDA make a part of their own after it."""
    if EVERY[name][0]["strategy"] in ("fedem", "fedfomo", "fedproto", "pfedfda"):
        return
    seen = SeenByNewcomer(monkeypatch)
    run_with(four, EVERY[name][0], hold_out_epochs=0, rounds=2, evaluate_every=2)
    assert same(seen.start, seen.own)


def test_the_page_explains_each_kind():
    page = (Path(__file__).parents[3] / "docs/compare.md").read_text("utf-8")
    section = page.split("### A hospital that was not there\n")[1].split("\n### ")[0]
    explained = set(re.findall(r"^\* \*\*(\w+)\*\*: ", section, re.MULTILINE))
    assert explained == {method.info.newcomer for method in strategies().values()}
