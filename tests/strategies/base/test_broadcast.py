"""What a silo under a study accepts as the model of a round: the seed's first one, and near its own last one."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from cases import CASES, OPTIONS, typical
from failing import fails
from study_text import study_text
from tiny import TinyGrid, federate, random_silos
from two_layers import DEEP

from client import app as answer
from client.protocol.study import parse_study
from client.site.terms import read_terms
from partitions.common.errors import RunFailedError, UserError
from strategies import strategies
from strategies.base.silo import check_received, check_step
from strategies.base.transport.payload import array_record, tensor_of

METHODS = sorted(name for name, method in strategies().items() if not method.info.role.pooled)


def study(step):
    metrics = '"loss", "score", "accuracy"'
    return parse_study(
        study_text(participants=1, step=step, metrics=metrics, runs=1, bytes=9, days=1), "f"
    )


@pytest.fixture
def five(tmp_path):
    return random_silos(tmp_path, [6, 11, 8, 7, 9])


@pytest.fixture
def under(monkeypatch):
    """Every message of the test belongs to a study with this step."""

    def belong(step):
        monkeypatch.setattr(answer, "check_message", lambda *args, **kwargs: None)
        monkeypatch.setattr(
            answer,
            "read_terms",
            lambda node, run: replace(read_terms(node, run), study=study(step)),
        )

    return belong


def test_by_hand():
    """From (3, 4), of length 5, to (3, 9) is 5, one length; to (3, 14) it is two."""
    last = torch.tensor([3.0, 4.0])
    check_received("a", 2, torch.tensor([3.0, 9.0]), last, 1.0, first=False)
    check_received("a", 1, last.clone(), last, 1.0, first=True)
    far = "^a refuses: the model of round 2 is further from its last one than the study's step = 1$"
    for sent in (14.0, 99.0, math.nan):  # how far it is does not leave
        with pytest.raises(UserError, match=far):
            check_received("a", 2, torch.tensor([3.0, sent]), last, 1.0, first=False)
    with pytest.raises(
        UserError, match="the first model is not the one that the run's seed gives"
    ):
        check_received("a", 1, torch.nextafter(last, torch.tensor(9.0)), last, 1.0, first=True)


@typical(METHODS)
def test_an_honest_server_is_never_refused(three, under, name, tiny_bn, tmp_path):
    """Every method, its variants too, some silos absent at times: first models are the seed's, later steps short."""
    under(100.0)
    for case, (options, *_) in CASES.items():
        if case.partition(",")[0] != name:
            continue
        grids: list[TinyGrid] = []
        run = federate(
            three,
            prepare=grids.append,
            state_dir=tmp_path / case,
            **{**DEEP, **OPTIONS, **options, "rounds": 3},
        )
        assert len(grids[0].traffic) > 0 and not [
            r for _, r in grids[0].traffic if r.has_error()
        ], case
        assert run.rows


def replaced(grid, this, change):
    """From round ``this`` on the server sends this in place of every model that it sends in that round."""
    push = grid.push_messages

    def push_messages(messages):
        messages = list(messages)
        for message in messages:
            config = message.content.config_records.get("config", {})
            for key, record in list(message.content.array_records.items()):
                if config.get("round") == this and key.startswith("model."):
                    message.content[key] = array_record(
                        {"vector": change(tensor_of(record["vector"]))}
                    )
        return push(messages)

    grid.push_messages = push_messages


# The server's vector is no model that training starts from: a projection to d numbers.
NO_START = ("lp-proj",)
LOCAL = [name for name in METHODS if strategies()[name].info.receives == "nothing"]


@typical([name for name in METHODS if name not in LOCAL])
def test_a_crafted_first_model_is_refused(five, under, name, tiny_bn, tmp_path):
    """Red team: one number of the first model is another one. No silo trains on it, and none sends anything."""
    under(100.0)
    grids = []

    def crafted(vector):
        vector = vector.clone()
        vector[len(vector) // 2] += 0.5
        return vector

    def prepare(grid):
        grids.append(grid)
        replaced(grid, 1, crafted)

    with contextlib.suppress(RunFailedError):  # no silo answers
        federate(
            five,
            prepare=prepare,
            state_dir=tmp_path,
            **{**DEEP, **OPTIONS, **CASES[name][0], "rounds": 1},
        )
    trained = [pair for pair in grids[0].traffic if pair[0].metadata.message_type == "train"]
    sent = [
        any(k.startswith("model.") for k in message.content.array_records)
        for message, _ in trained
    ]
    refused = [
        r.has_error() and "the first model is not the one" in str(r.error.reason)
        for _, r in trained
    ]
    assert len(trained) == 5 and sum(sent) in (0, 5)
    assert refused == ([False] * 5 if name in NO_START else sent)


@pytest.mark.parametrize("method", ["fedavg", "pfedfda"])
def test_a_crafted_later_model_is_refused(five, under, method, tmp_path):
    """Red team: in round 3 the server sends 100 times the model; the silos, which would train on it, name the step.

    Of pFedFDA the body is bounded, for an honest head is up to 100 lengths away.
    """
    under(1.0)
    grids = []

    def prepare(grid):
        grids.append(grid)
        replaced(grid, 3, lambda vector: 100 * vector)

    with pytest.raises(RunFailedError):
        federate(
            five,
            method,
            rounds=4,
            prepare=prepare,
            state_dir=tmp_path,
            **DEEP | {"learning_rate": 0.01},
        )
    trained = [(m, r) for m, r in grids[0].traffic if m.metadata.message_type == "train"]
    replies = [(m.content["config"]["round"], r) for m, r in trained]
    assert not any(reply.has_error() for this, reply in replies if this < 3)
    reasons = [str(reply.error.reason) for this, reply in replies if this == 3]
    assert len(reasons) == 5 and all(
        "further from its last one than" in reason for reason in reasons
    )


@pytest.mark.parametrize("own", [None, torch.ones(4)], ids=["first training", "later"])
def test_a_step_bounds_the_parts_that_a_method_names(own):
    """From the last model, or the seed's. Of pFedFDA the body; its head follows from Gaussians, and has any length."""
    client = SimpleNamespace(
        silo=SimpleNamespace(name="a", max_step=1.0),
        state=SimpleNamespace(personal=own),
        info=SimpleNamespace(trains=True),
        first_model=lambda: torch.ones(4),
        bounded_parts=lambda: [slice(0, 2)],
        privacy=None,
        round=3,
    )
    check_step(client, torch.tensor([1.0, 1.0, 50.0, 50.0]))
    fails(
        UserError,
        "of round 3 is further from",
        check_step,
        client,
        torch.tensor([9.0, 9, 1, 1]),
    )
    if own is None:
        client.round = 1
        head = torch.tensor([1.0, 1.0, 50.0, 50.0])
        fails(UserError, "the first model is not the one", check_step, client, head)
    client.bounded_parts, client.round = list, 3
    check_step(client, torch.tensor([9.0, 9.0, 50.0, 50.0]))


@pytest.mark.parametrize("network", [DEEP, {}], ids=["two layers", "one layer"])
def test_pfedfda_trains_under_a_step(three, under, network, tmp_path):
    """In a network that is nothing but a head, too."""
    under(1.0)
    grids = list[TinyGrid]()
    options = network | {"learning_rate": 0.01, "absent": [("b", 1)], "prepare": grids.append}
    federate(three, "pfedfda", rounds=3, state_dir=tmp_path, **options)
    assert not [reply for _, reply in grids[0].traffic if reply.has_error()]
