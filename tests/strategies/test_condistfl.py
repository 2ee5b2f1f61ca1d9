"""ConDistFL: its loss by hand, a round of two silos in numbers of its own, and where it is FedAvg."""

from __future__ import annotations

import math

import pytest
import torch
from hospitals import NETWORKS, hospital_files, partly_labelled
from near import near
from tiny import federate
from torch.func import functional_call

from models.initialisation import flat_model
from models.samples import BYTE_MEAN, BYTE_STD
from models.tasks.segmentation import VOID
from partitions.silo_file import read_silo_file
from strategies.condistfl import distillation_loss, joined_background

RUN = {**NETWORKS["segmentation"], "learning_rate": 0.1, "normalization": "none"}
T = 2.0


def logits(*rows):
    """Of a sample of as many pixels, from e^(z/T)."""
    return T * torch.tensor(rows, dtype=torch.float64).T.log()[None]


def test_pixels_by_hand():
    """Classes 0, 1, 2, of which 2 is unlabelled: q is over 0 and 2. e^(z/T) of pixel 1: (1, 2, 3), of w (3, 1, 4).

    q = (1/4, 3/4), q_g = (3/7, 4/7). Pixel 2 is of class 1, of pixel 3 w says it, pixel 4 is ignored: none counts.
    Dice of class 0 is 2 (1/4 3/7) / (1/4 + 3/7) = 6/19, of class 2 2 (3/4 4/7) / (3/4 + 4/7) = 24/37.
    """
    new = logits((1, 2, 3), (1, 5, 1), (4, 1, 1), (1, 1, 9))
    old = logits((3, 1, 4), (1, 1, 1.5), (1, 9, 1), (2, 1, 1))
    y = torch.tensor([[0, 1, 0, VOID]])
    near(float(distillation_loss(new, old, y, (0, 2), T)), 1 - (6 / 19 + 24 / 37) / 2, 1e-4)
    joined = joined_background(new, (0, 2))[0, :, 0]
    near(joined[:2].tolist(), [math.log(1 + 9), math.log(4)])  # e^z = (1, 4, 9)


def pictures(file):
    """A hospital's training part as a network gets it."""
    part = read_silo_file(file).train
    x = torch.from_numpy(part.x).double().movedim(-1, 1)
    return (x - BYTE_MEAN) / BYTE_STD, torch.from_numpy(part.y).long()


def written_out(z, old, y, kept, lost, weight):
    """The loss of a batch, sample by sample and class by class, of probabilities."""
    total = 0.0
    for k in range(len(y)):
        p = z[k].exp() / z[k].exp().sum(0)
        parts = {0: p[0] + sum(p[c] for c in lost), **{c: p[c] for c in kept}}
        cross = -sum((parts[c].log() * (y[k] == c)).sum() for c in parts) / y[k].numel()
        dice = [
            (2 * (p[c] * (y[k] == c)).sum() + 1) / (p[c].sum() + (y[k] == c).sum() + 1)
            for c in kept
        ]
        total = total + cross + 1 - sum(dice) / len(dice)
        q, g = ((of[k] / T).exp() for of in (z, old))
        q, g = q / q.sum(0), g / g.sum(0)
        counts = (y[k] == 0) & ~sum((old[k].argmax(0) == c) for c in kept).bool()
        for c in (0, *lost) if weight else ():
            a, b = ((of[c] / (1 - sum(of[f] for f in kept) + 1e-5))[counts] for of in (q, g))
            total += (
                weight * (1 - 2 * (a * b).sum() / (a.sum() + b.sum() + 1e-5)) / (1 + len(lost))
            )
    return total / len(y)


@pytest.mark.parametrize("rounds, weight", [(1, 0.5), (3, 1.5)])
def test_two_silos_in_their_last_round(tmp_path, rounds, weight):
    """A step of the whole training part each, from the received model; south does not outline rings.

    Its weight of the distillation is 0.5 in the first round, and 1.5 in the last of three.
    """
    files = partly_labelled(tmp_path, "segmentation")
    files.pop("west")
    own = {"condistfl__first": 0.5, "condistfl__last": 1.5}
    run = federate(files, "condistfl", rounds=rounds, **own, **RUN)
    name, options = run.settings.model_for((1, 16, 16), "segmentation")
    model = flat_model(name, (1, 16, 16), 3, options, "cpu")
    start = run.received("south", rounds).double()
    ends, counts = [], []
    for silo, lost in (("north", ()), ("south", (2,))):
        x, y = pictures(files[silo])
        w = start.clone().requires_grad_()
        z, old = (
            functional_call(model.module.double(), model.layout.unflatten(of), (x,))
            for of in (w, start)
        )
        kept = [c for c in (1, 2) if c not in lost]
        loss = written_out(z, old, y, kept, lost, weight if lost else 0)
        ends.append(start - 0.1 * torch.autograd.grad(loss, w)[0])
        counts.append(len(y))
    expected = (counts[0] * ends[0] + counts[1] * ends[1]) / sum(counts)
    near(run.shared, expected, 1e-5)


def test_without_an_unlabelled_outline_it_is_fedavg(tmp_path):
    files = hospital_files(tmp_path, "segmentation")
    exact, plain = (federate(files, s, rounds=2, **RUN).shared for s in ("condistfl", "fedavg"))
    assert torch.equal(exact, plain)
