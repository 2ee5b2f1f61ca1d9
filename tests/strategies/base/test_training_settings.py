"""Settings of local training, each against PyTorch's own: a plain loop over the same batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

from models.flat import FlatModel
from models.samples import Samples
from models.tasks import MULTICLASS, task_of
from partitions.common.errors import DataError, UserError
from strategies.base.client import SiloClient
from strategies.base.run_settings import RunSettings, parse_settings
from strategies.base.silo import Silo
from strategies.base.state import State

RNG = np.random.default_rng(5)
X, Y = RNG.normal(size=(45, 6)).astype(np.float32), RNG.choice(3, 45, p=(0.6, 0.3, 0.1))


def network(norm: bool = False) -> nn.Sequential:
    torch.manual_seed(3)
    between = nn.BatchNorm1d(8) if norm else nn.Tanh()
    return nn.Sequential(nn.Linear(6, 8), between, nn.Linear(8, 3))


def client(norm: bool = False, **changes: Any) -> SiloClient:
    """A silo half of FedAvg with these settings, in round 2 of 5."""
    common = {"learning-rate": 0.1, "batch-size": 16, "local-epochs": 2, "rounds": 5}
    settings = parse_settings(common | {k.replace("_", "-"): v for k, v in changes.items()})
    model = FlatModel(network(norm))
    split = Samples(X, Y)
    silo = Silo("a", split, split, split, model, lambda purpose: model.vector.clone())
    made = SiloClient(silo, settings.common, None, State(), settings.strategy.info)
    made.round = 2
    return made


Loss = Callable[[Tensor, Tensor], Tensor]


def plain(
    made: SiloClient,
    make: Callable[[Any], torch.optim.Optimizer],
    loss: Loss = F.cross_entropy,
    *,
    clip: float = 0.0,
    parts: int = 1,
    rates: Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler] | None = None,
) -> Tensor:
    """The parameters (Σ,) after a loop as PyTorch's tutorials have it, on the batches of ``made``."""
    net = network()
    optimizer = make(net.parameters())
    scheduler = rates(optimizer) if rates else None
    for x, y in made.batches():
        optimizer.zero_grad()
        for index in torch.tensor_split(torch.arange(len(y)), parts):
            (loss(net(x[index]), y[index]) * len(index) / len(y)).backward()
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        if scheduler:
            scheduler.step()
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def assert_trains_as(made: SiloClient, expected: Tensor) -> None:
    default = client()
    for one in (made, default):
        one.train()
    torch.testing.assert_close(made.model.vector, expected, rtol=2e-6, atol=2e-7)
    assert (
        made.model.vector - default.model.vector
    ).abs().max() > 1e-4  # the setting does something


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.parametrize("amsgrad", [False, True])
def test_adamw_is_torchs(amsgrad: bool) -> None:
    made = client(optimizer="adamw", weight_decay=0.5, amsgrad=amsgrad)
    assert_trains_as(
        made,
        plain(made, lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.5, amsgrad=amsgrad)),
    )


def test_clip_gradient_is_clip_grad_norm() -> None:
    made = client(clip_gradient=0.05)
    assert_trains_as(made, plain(made, sgd, clip=0.05))


def test_label_smoothing_is_torchs() -> None:
    made = client(label_smoothing=0.3)
    assert_trains_as(
        made,
        plain(made, sgd, lambda outputs, y: F.cross_entropy(outputs, y, label_smoothing=0.3)),
    )


def test_accumulated_parts_are_the_batch() -> None:
    """Without normalisation over a batch, its gradient is the sum of its parts'; each part is computed alone."""
    made, seen = client(accumulate=3), []
    made.model.module.register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
    made.train()
    assert seen[:6] == [6, 5, 5, 6, 5, 5] and max(seen) == 6
    torch.testing.assert_close(made.model.vector, plain(made, sgd, parts=3))
    torch.testing.assert_close(made.model.vector, plain(made, sgd))


def test_no_part_is_too_small_for_batch_norm() -> None:
    made, seen = client(norm=True, accumulate=16), []
    made.model.module.register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
    made.train()
    assert min(seen) == 2


def test_warmup_batches_are_linear_lr() -> None:
    """Step s of the first W has s / (W + 1) of the rate; the training has 6 steps."""
    made = client(warmup_batches=4)
    assert_trains_as(
        made, plain(made, sgd, rates=lambda o: lr_scheduler.LinearLR(o, 1 / 5, 1.0, 4))
    )


@pytest.mark.parametrize("warm", [0, 3])
@pytest.mark.parametrize("schedule", ["constant", "cosine", "step"])
def test_a_schedule_over_rounds_is_torchs(schedule: str, warm: int) -> None:
    settings = {"learning-rate": 0.5, "rounds": 12, "schedule": schedule, "warmup-rounds": warm}
    common = parse_settings(settings | {"schedule-every": 2, "schedule-factor": 0.5}).common
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    after: dict[str, lr_scheduler.LRScheduler] = {
        "constant": lr_scheduler.ConstantLR(optimizer, 1.0),
        "cosine": lr_scheduler.CosineAnnealingLR(optimizer, 12 - warm),
        "step": lr_scheduler.StepLR(optimizer, 2, 0.5),
    }
    first = lr_scheduler.LinearLR(optimizer, 1 / (warm + 1), 1.0, max(warm, 1))
    both = lr_scheduler.SequentialLR(optimizer, [first, after[schedule]], [warm])
    for server_round in range(1, 13):
        ours = common.decayed(0.5, server_round)
        assert ours == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-6), server_round
        optimizer.step()
        both.step()
    assert common.decayed(0.5, 13) == common.decayed(0.5, 12)  # where newcomers train


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"warmup-rounds": 5}, "warmup-rounds = 5: fewer than rounds = 5"),
        ({"dp": True, "clip-gradient": 1.0}, "dp = true: not with clip-gradient = 1"),
        ({"dp": True, "accumulate": 2}, "dp = true: not with accumulate = 2"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        parse_settings({"rounds": 5, **changes})


def settings(**changes: Any) -> RunSettings:
    return parse_settings({k.replace("_", "-"): v for k, v in changes.items()})


def test_what_does_not_fit_the_task_is_refused() -> None:
    with pytest.raises(DataError, match=r"label-smoothing = 0.1: .* not for multilabel"):
        settings(label_smoothing=0.1).check_task(task_of("multilabel"), 3)
    with pytest.raises(DataError, match=r"label-smoothing = 0.1: loss = cross-entropy has it"):
        settings(label_smoothing=0.1, loss="focal").check_task(MULTICLASS, 3)
    with pytest.raises(UserError, match="accumulate = 2: not for survival"):
        settings(accumulate=2).check_task(task_of("survival"), 1)
