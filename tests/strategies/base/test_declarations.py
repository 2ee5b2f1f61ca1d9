"""docs/attacks.md's table of what is seen: made of the methods' declarations, and these are held against messages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from cases import CASES, OPTIONS, typical
from near import near
from tiny import federate, rows_of, same, write_silo
from two_layers import DEEP, replies_of, sent_by

from strategies import strategies
from strategies.base.declarations import PAGES, with_table
from strategies.base.transport.payload import decode
from strategies.base.transport.reporting import SECONDS, SUMMARY

ROOT = Path(__file__).parents[3]


def travels(values, sent):
    """Whether these values stand in a row somewhere in what was sent."""
    return len(values) <= len(sent) and bool(
        (sent.unfold(0, len(values), 1) == values).all(1).any()
    )


def own_model(run, silo="a"):
    """What the last round's message has of the silo's own model: ``sent`` whole, some ``layers``, or it is ``kept``."""
    own, last = run.personal(silo), replies_of(run, silo)[-1][2]
    tensors = [own[e.start : e.stop] for e in run.strategy.layout.parameters]
    found = [any(travels(one, m.vector) for m in last.models.values()) for one in tensors]
    return "sent" if all(found) else "layers" if any(found) else "kept"


def peers(run):
    """What a silo gets of others': ``models`` as they were sent, a ``mixture`` of its own, all the same ``mean``."""
    down = {}
    for message, _ in run.grid.traffic:
        if message.metadata.message_type == "train":
            payload, config = decode(message.content)
            key = int(str(config["round"])), run.grid.name_of(message.metadata.dst_node_id)
            down[key] = {
                name: m.vector for name, m in payload.models.items() if name != "buffers"
            }
    sent = {
        (r, silo): [m.vector for m in payload.models.values()]
        for r, silo, payload, _ in replies_of(run)
    }
    for (r, silo), models in down.items():
        others = [
            v for (at, by), vectors in sent.items() if at < r and by != silo for v in vectors
        ]
        if any(same(mine, other) for mine in models.values() for other in others):
            return "models"
    pairs = [
        (a, b)
        for (r, i), a in down.items()
        for (at, j), b in down.items()
        if r == at > 1 and i < j
    ]
    if any(
        len(a[n]) == len(b[n]) and not same(a[n], b[n])
        for a, b in pairs
        for n in a.keys() & b.keys()
    ):
        return "mixture"
    return "mean" if any(down.values()) else "nothing"


@typical(CASES)
def test_the_declarations_are_what_the_messages_show(three, name, tiny_bn):
    settings, _, _ = CASES[name]
    run = federate(three, **{**DEEP, **OPTIONS, **settings}, rounds=4)
    method = strategies()[settings["strategy"]]
    assert (own_model(run), peers(run)) == (method.info.own_model, method.info.receives)


def test_fedavg_ft_sends_its_own_model_with_default_settings(three):
    """One epoch of fine-tuning from the received model is the local training over again, in the same order."""
    run = federate(three, "fedavg-ft", **DEEP, rounds=2)
    assert same(sent_by(run, "a", -1), run.personal("a"))
    more = federate(three, "fedavg-ft", **DEEP, rounds=2, local_epochs=2)
    assert not same(sent_by(more, "a", -1), more.personal("a"))

    prox = federate(three, "fedprox-ft", **{"fedprox-ft.mu": 0.0}, **DEEP, rounds=2)
    assert same(sent_by(prox, "a", -1), prox.personal("a"))


@pytest.mark.parametrize("name", PAGES)
def test_the_page_has_every_method_as_it_is_declared(name):
    page = (ROOT / "docs" / name).read_text("utf-8")
    assert page == with_table(page, PAGES[name]()), "make settings writes it"
    assert all(f"`{method}`" in PAGES[name]() for method in strategies())


def test_the_page_explains_every_number_that_is_released(two):
    """All keys of a data summary, and all records of a reply, stand in the first column of the page's table."""
    page = (ROOT / "docs/privacy.md").read_text("utf-8")
    table = page.split("## What leaves, number by number")[1].split("\n## ")[0]
    named = set(
        re.findall(
            r"`([^`]+)`",
            "".join(line.split("|")[1] for line in table.splitlines() if line[:1] == "|"),
        )
    )
    assert set(SUMMARY) | set(SECONDS) <= named
    run = federate(two, "fedavg", **DEEP, rounds=1)
    records = {name for _, reply in run.grid.traffic for name in reply.content} - {"summary"}
    assert {"config", "metrics"} <= records
    assert {name for name in records if not name.startswith("model.")} <= named


def test_a_zero_model_and_a_full_batch_give_exact_class_counts(tmp_path, zero_start):
    """The attack that hospital.md once denied: class counts do not stay.

    A server may send any model. With zero weights softmax is 1/C for each sample, and a step of a full batch moves the
    last bias by -η (1/C - n_c / n): n_c = n (1/C + Δb_c / η), exactly, and the server knows n from the data summary.
    """
    counts = {"a": [5, 3, 2], "b": [0, 4, 4], "c": [1, 0, 12]}
    files = {}
    for silo, per_class in counts.items():
        y = [label for label, n in enumerate(per_class) for _ in range(n)]
        x = torch.randn(len(y), 3, generator=torch.Generator().manual_seed(len(y)))
        files[silo] = write_silo(
            tmp_path / f"{silo}.npz", x.numpy().astype(float), y, classes=3
        )
    run = federate(files, "fedavg", rounds=1, learning_rate=0.5)
    for _, silo, payload, _ in replies_of(run):
        sent = payload.models["model"]
        received = run.received(silo, 1)
        moved = (sent.vector - received)[-3:]
        assert [round(n) for n in (sent.samples * (1 / 3 + moved / 0.5)).tolist()] == counts[
            silo
        ]


def test_one_patient_is_read_off_the_first_layer(tmp_path):
    """The attack of the page's first lines: a silo that trains on one patient sends the record, for dW_i / db_i = x."""
    rows = [[0.25, -1.5, 3.0]]
    files = {
        "a": write_silo(tmp_path / "a.npz", rows, [1]),
        "b": write_silo(tmp_path / "b.npz", rows * 2, [0, 1]),
    }
    run = federate(files, "fedavg", rounds=1)
    sent = sent_by(run, "a", 0)
    received = run.received("a", 1)
    moved = sent - received
    near(
        moved[:3] / moved[6], torch.tensor(rows_of(files["a"])[0][0], dtype=torch.float32), 1e-4
    )
