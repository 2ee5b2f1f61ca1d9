"""Where training pictures are changed, and where not: in the batches that models are trained on, and nowhere else."""

from __future__ import annotations

import pytest
import torch
from hospitals import NAMES, NETWORKS, hospital_files
from representatives import sampled
from tiny import comparable, federate

from strategies.base.client import SiloClient
from strategies.base.trainer.loop import full_gradient

AUGMENT = "flip,rotate:15,shift:1.5,perspective:0.2,brightness:0.1"
SETTINGS = {
    "learning_rate": 0.1,
    "batch_size": 16,
    "normalization": "agreed",
    "local_epochs": 2,
}


def go(folder, task="multilabel", **changes):
    return federate(
        hospital_files(folder, task), **{**NETWORKS[task], **SETTINGS, "rounds": 2, **changes}
    )


def clients(monkeypatch, folder, augment, **changes):
    """The silo half of one silo, as the app makes it in round 1."""
    made = []
    own = SiloClient.__init__

    def init(self, *given):
        own(self, *given)
        made.append(self)

    with monkeypatch.context() as patch:
        patch.setattr(SiloClient, "__init__", init)
        go(folder, augment=augment, rounds=1, **changes)
    return made[-1]


def test_batches_are_changed_and_nothing_else_is_drawn(tmp_path, monkeypatch):
    """The same samples in the same order; dropout's generator stands where it would; each epoch is changed anew."""
    plain, changed = (clients(monkeypatch, tmp_path, text) for text in ("", AUGMENT))
    before, state = list(plain.batches(3)), torch.get_rng_state()
    after = list(changed.batches(3))
    assert torch.equal(state, torch.get_rng_state())
    assert all(
        torch.equal(a[1], b[1]) and not torch.equal(a[0], b[0])
        for a, b in zip(before, after, strict=True)
    )
    again = list(changed.batches(3, as_they_are=True))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(before, again, strict=True))
    third = len(after) // 3
    epochs = [
        torch.cat([x.flatten(1) for x, _ in part]) for part in (after[:third], after[-third:])
    ]
    assert not torch.equal(epochs[0].sort(0).values, epochs[1].sort(0).values)
    changed.model.load(plain.model.vector)
    assert torch.equal(full_gradient(plain, "x"), full_gradient(changed, "x"))


def test_what_is_evaluated_is_not_changed(tmp_path):
    """Both runs evaluate the initial model on the same pictures; after a round they differ."""
    plain, changed = go(tmp_path), go(tmp_path, augment=AUGMENT)
    for name in NAMES:
        one, other = (run.values("loss", name, "received") for run in (plain, changed))
        assert one[0] == other[0] and one[1] != other[1]


def test_ala_learns_its_weights_on_pictures_as_they_are(tmp_path, monkeypatch):
    mixed = []
    for augment in ("", AUGMENT):
        client = clients(
            monkeypatch, tmp_path, augment, strategy="fedala", fedala__eta=5.0, fedala__layers=2
        )
        client.state, theta = client.state_type({}, {}), client.silo.initial("")
        mixed.append(client.adapt(theta, theta + 0.1))
        assert not torch.equal(
            client.state.arrays["weights"], torch.ones_like(client.state.arrays["weights"])
        )
    assert torch.equal(*mixed)


@sampled("task", ["multilabel", "segmentation"], 2)
def test_a_run_that_is_resumed_is_the_same(tmp_path, task):
    settings = {"strategy": "apple", "augment": AUGMENT}
    whole = go(tmp_path, task, **settings, rounds=3)
    run = {**settings, "directory": tmp_path / "run"}
    go(tmp_path, task, **run, rounds=2)
    again = go(tmp_path, task, **run, rounds=3, resume=True)
    assert comparable(again.rows) == comparable(whole.rows)
    assert comparable(whole.rows) != comparable(
        go(tmp_path, task, strategy="apple", rounds=3).rows
    )


def test_tables_are_refused_before_anything_is_trained(tmp_path):
    with pytest.raises(
        ValueError,
        match="augment changes pictures: for tables, texts and signals leave it empty",
    ):
        go(tmp_path, "survival", augment="flip")
