"""One-run audit of private training: `python -m benchmarks.dp audit canaries` (Steinke, Nasr, Jagielski, 2305.08846).

Each of m canaries is among the training records with probability 1/2. An attacker who sees what is released guesses
which: the r / 2 with the highest scores were in, the r / 2 with the lowest were not. From c right guesses follows a
lower bound of ε, at 95 %. It must not be above what the accountant claims. It cannot be above what r right guesses of r
would show, which is printed beside it.

A canary has a column of its own, so that its gradient touches numbers that no other record's does. It is looked for in
every noised gradient (which the accountant grants an attacker), in the sent model, and in the exported one. Faults are
planted, too, which the audit has to find: no noise on one layer, clipping after averaging, batches in turns.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.stats import binom
from torch import Tensor

from client.privacy.private_round import private_round
from models.initialisation import flat_model
from models.privacy import clipping
from models.privacy.accountant import Releases, composed_epsilon
from models.samples import Samples
from strategies import strategies
from strategies.base import privacy as private
from strategies.base.client import SiloClient
from strategies.base.privacy import Privacy, PrivateTraining, Units
from strategies.base.settings import Common, NoSettings
from strategies.base.silo import Silo
from strategies.base.state import GLOBAL, State
from strategies.base.transport.payload import Model

DELTA = 1e-5
FAULTS = ("none", "layer", "average", "fixed")
VIEWS = ("gradients", "sent", "exported")


def lower_bound(
    guesses: int, right: int, canaries: int, delta: float, level: float = 0.05
) -> float:
    """Return the largest ε that this number of right guesses contradicts at this level."""

    def p_value(epsilon: float) -> float:
        q = 1 / (1 + math.exp(-epsilon))
        # P(X >= c), P(X >= c - 1), ..., P(X >= 0)
        tail = binom.sf(np.arange(right, -1, -1) - 1, guesses, q)
        alpha = max(((tail[i] - tail[0]) / i for i in range(1, right + 1)), default=0.0)
        return min(1.0, float(tail[0] + 2 * canaries * delta * alpha))

    if p_value(0.0) > level:
        return 0.0
    return float(brentq(lambda epsilon: p_value(epsilon) - level, 0.0, 20.0))


@dataclass(frozen=True)
class AuditResult:
    """The result of one view: the lower bound, the largest possible one, and the claimed ε."""

    view: str
    bound: float
    most: float
    claimed: float


def data(
    canaries: int, others: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return rows (n, m + 4), labels, and which canaries are in; other records use the last four columns."""
    inside = rng.random(canaries) < 0.5
    of_canaries = 30 * np.eye(canaries, canaries + 4, dtype=np.float32)[inside]
    of_others = np.zeros((others, canaries + 4), np.float32)
    of_others[:, canaries:] = rng.normal(size=(others, 4))
    rows = np.concatenate([of_canaries, of_others])
    return rows, (rows[:, -1] > 0).astype(np.int64), inside


def planted(fault: str, turns: np.ndarray) -> AbstractContextManager[Any]:
    """Return a context with this fault in the mechanism; ``turns`` (n,): for each record the number of its turn."""
    noised, total = private.add_noise, clipping.Clipping.total

    def without_a_layer(sum_: Tensor, deviation: float, key: bytes) -> Tensor:
        result = noised(sum_, deviation, key)
        result[: len(result) // 2] = sum_[: len(result) // 2].double()
        return result

    def after_averaging(self: Any, x: Any, y: Tensor, *rest: Any) -> Any:
        clip, self.clip_norm = self.clip_norm, 1e9
        result, value = total(self, x, y, *rest)
        self.clip_norm = clip
        return result * min(1.0, clip * max(len(y), 1) / float(result.norm() + 1e-6)), value

    def by_turns(self: PrivateTraining, call: int, epoch: int, device: torch.device) -> Any:
        steps = self.sampling.steps_of_epoch(epoch)
        return [
            (torch.from_numpy(np.flatnonzero(turns % steps == step)), None)
            for step in range(steps)
        ]

    patches: dict[str, Any] = {
        "none": (private, "add_noise", noised),
        "layer": (private, "add_noise", without_a_layer),
        "average": (clipping.Clipping, "total", after_averaging),
        "fixed": (PrivateTraining, "draw_batches", by_turns),
    }
    patch: AbstractContextManager[Any] = mock.patch.object(*patches[fault])
    return patch


def audit(
    target: float, *, fault: str = "none", canaries: int = 500, others: int = 500, guesses: int = 100,
    rounds: int = 1,
) -> list[AuditResult]:  # fmt: skip
    """Train one silo with a claimed ε of ``target`` and guess from each view."""
    rows, labels, inside = data(canaries, others, np.random.default_rng(0))
    model = flat_model("linear", (canaries + 4,), 2, None, "cpu")
    common = Common(dp=True, batch_size=32, rounds=rounds, learning_rate=0.1, evaluate_every=0)
    privacy = Privacy(target_epsilon=target, delta=DELTA)
    train, empty = Samples(rows, labels), Samples(rows[:0], labels[:0])
    start = torch.zeros(model.layout.size)
    silo = Silo("a", train, empty, empty, model, lambda purpose: start)
    state, received, claimed = State(), start, []
    gradients: list[Tensor] = []
    real = PrivateTraining.gradient

    def seen(self: PrivateTraining, *batch: Any) -> Tensor:
        value = real(self, *batch)
        gradients.append(self.model.gradient * self.sampling.divisor)
        return value

    turns = np.concatenate([np.flatnonzero(inside), canaries + np.arange(others)])
    with planted(fault, turns), mock.patch.object(PrivateTraining, "gradient", seen):
        for number in range(1, rounds + 1):
            client = SiloClient(silo, common, NoSettings(), state, strategies()["fedavg"].info)
            config = {
                "round": number,
                "models": {GLOBAL: Model(received)},
                "numbers": {},
                "evaluate": False,
            }
            private_round(client, privacy, Units(len(rows)), b"0", config)
            assert client.privacy is not None
            claimed.append(client.privacy.plan)
            (received,), _, _ = client.fit([received], config)
            state = client.state
    epsilon = composed_epsilon([p.releases for p in claimed], DELTA)
    along = torch.stack([_column(g, canaries, fault) for g in gradients])
    views = {
        "gradients": _score_of_steps(along, claimed[0].releases, fault),
        "sent": -_column(received, canaries, fault),
        "exported": -_column(state.arrays["personal"], canaries, fault),
    }
    return [
        AuditResult(view, *_bound(score, inside, guesses), epsilon)
        for view, score in views.items()
    ]


def _column(vector: Tensor, canaries: int, fault: str) -> Tensor:
    """Return the component (m,) of a vector along each canary's gradient, which for label 0 is (-1, 1) / sqrt(2) at 0.

    With a faulty layer, only that layer is used, because an attacker can examine each.
    """
    weight = vector[: 2 * (canaries + 4)].view(2, -1)[:, :canaries]
    return -(2**0.5) * weight[0] if fault == "layer" else (weight[1] - weight[0]) / 2**0.5


def _score_of_steps(along: Tensor, releases: Releases, fault: str) -> Tensor:
    """Return the log-likelihood ratio (m,) of being drawn at the sample rate in each step of ``along`` (steps, m)."""
    # A gradient of a canary points away from its label, and steps go against it.
    along, q, variance = along.double(), releases.sample_rate, releases.noise_multiplier**2
    if fault == "fixed":  # whose turn it is is known
        canary = torch.arange(along.shape[1])
        return along.view(-1, round(1 / q), len(canary))[:, canary % round(1 / q), canary].sum(
            0
        )
    if fault == "layer":
        return along.amax(0)
    ratio = (2 * along - 1) / (2 * variance)
    return torch.logaddexp(ratio + math.log(q), torch.full_like(ratio, math.log1p(-q))).sum(0)


def _bound(score: Tensor, inside: np.ndarray, guesses: int) -> tuple[float, float]:
    """Return the lower bound from these scores, and the one without a wrong guess."""
    order, half = np.argsort(score.numpy(), kind="stable"), guesses // 2
    right = int(inside[order[-half:]].sum() + (~inside[order[:half]]).sum())
    return tuple(lower_bound(guesses, c, len(inside), DELTA) for c in (right, guesses))  # type: ignore[return-value]


def lines() -> Iterator[str]:
    """Yield a line for each claimed epsilon and each fault, with the result of each view."""
    torch.set_num_threads(1)
    for target, fault in itertools.product((1.0, 3.0, 8.0), FAULTS):
        views = audit(target, fault=fault, canaries=1000, rounds=2)
        line = ", ".join(f"{f.view} {f.bound:.2f}" for f in views)
        note = " EXCEEDED" if any(f.bound > f.claimed for f in views) else ""
        yield f"claimed {views[0].claimed:.2f}, fault {fault}: {line}; at most {views[0].most:.2f}{note}"
