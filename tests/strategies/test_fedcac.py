"""FedCAC: critical parameters and overlaps by hand, rounds in numpy, FedAvg and Local as limits (B21)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from near import near
from tiny import Numbers, federate, random_silos, rows_of, same
from two_layers import DEEP, deep_gradient, losing, replies_of

from models.layout import Entry, Layout
from server.run.reporter import Progress
from strategies.base.transport.payload import array_record
from strategies.fedcac import critical, overlap, pack_bits, unpack_bits

OPTIONS = {"rounds": 4, "local_epochs": 2, "batch_size": 4, "learning_rate": 0.2}
# The four tensors of two_layers.py
PARTS = (slice(0, 12), slice(12, 16), slice(16, 28), slice(28, 31))


def test_critical_parameters_by_hand():
    """c = |(w' - w) w'| tensor by tensor; half of 4 are 2, half of 3 is 1; ties count, what has not moved does not."""
    layout = Layout(
        (Entry("w", (4,), 0, 4), Entry("b", (3,), 4, 7), Entry("d", (2,), 7, 9)), (), ()
    )
    before = torch.tensor([0, 0, 1, 5, 0, 0, 0, 3, 1], dtype=torch.float32)
    # C = 1 4 2 0, 1 1 0, 0 0
    after = torch.tensor([1, 2, 2, 5, 1, -1, 0, 3, 1], dtype=torch.float32)
    assert critical(layout, before, after, 0.5).tolist() == [0, 1, 1, 0, 1, 1, 0, 0, 0]
    assert critical(layout, before, after, 0.25).tolist() == [0, 1, 0, 0, 0, 0, 0, 0, 0]
    assert critical(layout, before, after, 0.75).tolist() == [1, 1, 1, 0, 1, 1, 0, 0, 0]
    assert not bool(critical(layout, before, after, 0.0).any())
    assert bool(critical(layout, before, after, 1.0).all())


def test_overlaps_by_hand():
    """Two common of two; one common of two; of two and of four: 1 - 2/4 and 1 - 2/8; none marked: 0."""
    masks = torch.tensor(
        [[1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]], dtype=torch.float32
    )
    assert overlap(masks).tolist() == [
        [1, 0.5, 0.5, 0.5],
        [0.5, 1, 0.5, 0.5],
        [0.75, 0.75, 1, 0.5],
        [0, 0, 0, 0],
    ]


@pytest.mark.parametrize("size", [1, 8, 31, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_bits_are_packed_by_eight(size, dtype):
    mask = torch.rand(size, generator=torch.Generator().manual_seed(size)) < 0.5
    packed = pack_bits(mask)
    assert packed.shape == (-(-size // 8),) and packed.dtype == torch.float32
    assert same(unpack_bits(packed.to(dtype).float(), size), mask)


def marked(before, after, tau):
    mask = np.zeros(31, bool)
    for part in PARTS:
        c = np.abs((after[part] - before[part]) * after[part])
        mask[part] = (c >= np.sort(c)[::-1][int(tau * len(c)) - 1]) & (c > 0)
    return mask


def test_rounds_in_numpy(tmp_path):
    """Six rounds of four silos with β = 4: fewer and fewer are like enough.

    b is away in round 2, a's reply of round 3 is left out: their last models and masks stay in the comparison.
    """
    files = random_silos(tmp_path, [6, 10, 8, 9])
    prepare = losing(("a", 3), absent=[("b", 2)])
    run = federate(
        files,
        "fedcac",
        rounds=6,
        local_epochs=3,
        fedcac__tau=0.5,
        fedcac__beta=4,
        prepare=prepare,
        **DEEP,
    )
    shared = run.received("a", 1).double().numpy()
    models: dict[str, Numbers] = {}
    masks: dict[str, npt.NDArray[np.bool_]] = {}
    sizes = []
    for r in range(1, 7):
        names = sorted(models)
        pairs = {
            (i, j): 1 - np.sum(masks[i] ^ masks[j]) / (2 * masks[i].sum())
            for i in names
            for j in names
            if i != j
        }
        starts = {}
        for silo in files:
            starts[silo] = shared
            if silo in models:
                level = np.mean(list(pairs.values())) + (r - 1) / 4 * (
                    max(pairs.values()) - np.mean(list(pairs.values()))
                )
                like = [
                    j
                    for j in names
                    if j == silo or (r - 1 <= 4 and pairs[silo, j] >= level - 1e-12)
                ]
                sizes.append((r, len(like)))
                own = np.mean([models[j] for j in like], axis=0)
                starts[silo] = np.where(masks[silo], own, shared)
                if (silo, r) != ("b", 2):
                    sent = run.sent_to(silo, r)["customised"].vector.numpy()
                    near(sent, own)
        came = [s for s in files if (s, r) not in (("b", 2), ("a", 3))]
        ends = {}
        for silo in came:
            w = starts[silo].copy()
            for _ in range(3):
                w -= 0.3 * deep_gradient(w, *rows_of(files[silo]))
            ends[silo] = w
        for silo in came:
            models[silo], masks[silo] = ends[silo], marked(starts[silo], ends[silo], 0.5)
        shared = np.average(
            [ends[s] for s in came], axis=0, weights=[len(rows_of(files[s])[1]) for s in came]
        )
    run.ends_near(shared, ends)
    assert max(n for r, n in sizes if r == 2) > 1 and {n for r, n in sizes if r == 6} == {1}


def test_everything_critical_is_local_after_round_beta(three):
    """τ = 1, β = 1: round 2 starts from the plain mean of all models, later rounds from the silo's own."""
    run = federate(three, "fedcac", fedcac__tau=1.0, fedcac__beta=1, **OPTIONS)
    sent = {(r, s): p.models["model"].vector for r, s, p, _ in replies_of(run)}
    mean = torch.stack([sent[1, s] for s in three]).mean(0)
    for silo in three:
        near(run.sent_to(silo, 2)["customised"].vector, mean, 1e-5)
        for r in (3, 4):
            assert same(run.sent_to(silo, r)["customised"].vector, sent[r - 1, silo])
    losses = [run.values("loss", "a", snapshot) for snapshot in ("received", "personal")]
    assert losses[0][3:] == losses[1][2:]  # it starts where it ended


def test_other_numbers_than_bits_are_refused(three):
    def after(silo, message, reply):
        if silo == "c" and message.metadata.message_type == "train":
            reply.content["model.critical"] = array_record({"vector": torch.tensor([0.5, 0.3])})
        return reply

    seen: list[Progress] = []
    federate(
        three,
        "fedcac",
        rounds=1,
        prepare=lambda g: setattr(g, "after", after),
        watch=seen.append,
    )
    assert "other numbers than those that bits are packed in" in seen[0].rejected["c"]
