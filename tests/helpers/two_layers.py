"""A network of two layers in numpy, a quadratic loss, and runs that start from given numbers.

``mlp`` with one hidden layer has the blocks fc1 and fc2, so it can be split into shared and personal parts.
:func:`deep_gradient` is its gradient in float64 numpy; with :func:`quadratic_loss` in place of the cross-entropy the
linear model of ``tiny.py`` has optima and curvatures that are known exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from flwr.app import Message
from tiny import Files, Numbers, Run, TinyGrid, comparable, federate, round_of, same, write_silo
from torch import Tensor

import client.session
import models.tasks
import models.tasks.base
import server.run.loop
from strategies.base.transport.payload import Payload, decode

HIDDEN = 4
# Three columns and classes: Σ = 31
DEEP: dict[str, Any] = {"mlp__hidden": str(HIDDEN), "learning_rate": 0.3}
FC1, FC2 = slice(0, 4 * HIDDEN), slice(4 * HIDDEN, 7 * HIDDEN + 3)


def deep_gradient(
    w: Numbers, x: Numbers, y: npt.NDArray[np.int64], classes: int = 3
) -> Numbers:
    """Gradient of the mean cross-entropy of W2 relu(W1 x + b1) + b2; w = (W1 row by row, b1, W2 row by row, b2).

    With h = relu(z), p = softmax: dL/dW2 = mean (p - e_y) hᵀ, dL/dz = 1[z > 0] W2ᵀ (p - e_y), dL/dW1 = mean dL/dz xᵀ.
    """
    columns = x.shape[1]
    hidden = (len(w) - classes) // (columns + 1 + classes)
    a, b = hidden * columns, hidden * (columns + 1)
    w1 = w[:a].reshape(hidden, columns)
    b1 = w[a:b]
    w2 = w[b:-classes].reshape(classes, hidden)
    b2 = w[-classes:]
    z = x @ w1.T + b1
    h = np.maximum(z, 0)
    p = np.exp(h @ w2.T + b2)
    p /= p.sum(1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    dz = (p @ w2) * (z > 0)
    return np.concatenate([(dz.T @ x).ravel(), dz.sum(0), (p.T @ h).ravel(), p.sum(0)]) / len(y)


def network(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden features and logits of the network."""
    h = torch.relu(x @ w[:12].view(4, 3).T + w[12:16])
    return h, h @ w[16:28].view(3, 4).T + w[28:]


def quadratic_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """The training loss becomes (1/2) mean ||logits - e_y||²."""

    def loss(logits: Tensor, y: Tensor) -> Tensor:
        target = torch.nn.functional.one_hot(y, logits.shape[1]).to(logits)
        return (logits - target).square().sum(1).mean() / 2

    monkeypatch.setattr(models.tasks.base, "loss_function", lambda *_: loss)


def quadratic_terms(
    x: Numbers, y: npt.NDArray[np.int64], classes: int
) -> tuple[Numbers, Numbers]:
    """Hessian H and linear term c of that loss for the linear model: f(w) = wᵀ H w / 2 - cᵀ w + const.

    With x~ = (x, 1) and one row θ_k of (W, b) per class, f = sum_k (1/2) mean (θ_k x~ - e_yk)², so every class has the
    Hessian mean x~ x~ᵀ and the linear term mean e_yk x~; the rows are then brought into w's order, weights first.
    """
    n, d = x.shape
    wide = np.column_stack([x, np.ones(n)])
    target = np.eye(classes)[y]
    hessian = np.kron(np.eye(classes), wide.T @ wide / n)
    linear = (target.T @ wide / n).ravel()
    rows = np.arange(classes * (d + 1)).reshape(classes, d + 1)
    order = np.concatenate([rows[:, :d].ravel(), rows[:, d]])
    return hessian[np.ix_(order, order)], linear[order]


def isotropic_silos(folder: Path, labels: Mapping[str, tuple[int, int]]) -> Files:
    """Silos of the two rows x = 1 and x = -1: mean x~ x~ᵀ = 1, so one gradient step of the right length is exact."""
    return {
        name: write_silo(folder / f"{name}.npz", [[1], [-1]], y) for name, y in labels.items()
    }


def start_at(monkeypatch: pytest.MonkeyPatch, vector: list[float]) -> None:
    """Every initial model is this one. The next run forgets the models by itself (see ``tiny.federate``)."""
    values = torch.tensor(vector, dtype=torch.float32)

    def fixed(*arguments: object) -> Callable[[str], Tensor]:
        return lambda purpose: values.clone()

    monkeypatch.setattr(client.session, "initial_model", fixed)
    monkeypatch.setattr(server.run.loop, "initial_model", fixed)


def replies_of(run: Run, silo: str = "") -> list[tuple[int, str, Payload, Message]]:
    """(round, silo, payload, reply) of all training replies, or of one silo's, in order."""
    result = []
    for message, reply in run.grid.traffic:
        name = run.grid.name_of(message.metadata.dst_node_id)
        if (
            message.metadata.message_type == "train"
            and silo in ("", name)
            and not reply.has_error()
        ):
            result.append((round_of(message), name, decode(reply.content)[0], reply))
    return result


def sent_by(run: Run, silo: str, which: int = -1, name: str = "model") -> Tensor:
    """A vector of one of the silo's training replies."""
    vector: Tensor = replies_of(run, silo)[which][2].models[name].vector
    return vector


def rounds_trained(run: Run, silo: str) -> list[int]:
    return [server_round for server_round, _, _, _ in replies_of(run, silo)]


def waits(run: Run, silo: str, split: str = "test") -> list[int]:
    """The rounds, from 2 on, that a silo did not train in: it must have reported its personal model as it was."""
    trained, losses = rounds_trained(run, silo), run.values("loss", silo, "personal", split)
    missed = [r for r in range(2, run.settings.common.rounds + 1) if r not in trained]
    assert all(losses[r - 1] == losses[r - 2] for r in missed)
    return missed


def snapshot_rows(
    run: Run, snapshot: str, *, without_training: bool = False
) -> list[list[str]]:
    """What the history says of this snapshot, as text."""
    return comparable(
        [
            r
            for r in run.rows
            if r.snapshot == snapshot and not (without_training and r.split == "train")
        ]
    )


def assert_received_is_fedavgs(files: Files, method: str, options: Mapping[str, Any]) -> None:
    """What is sent and averaged is FedAvg's bit for bit: every metric of the received model, the model, the bytes."""
    plain = federate(
        files,
        strategy="fedavg",
        **{k: v for k, v in options.items() if not k.startswith(f"{method}__")},
    )
    run = federate(files, strategy=method, **options)
    assert snapshot_rows(plain, "received") == snapshot_rows(run, "received")
    assert same(plain.shared, run.shared)
    for direction in ("bytes_down", "bytes_up"):
        assert plain.values(direction) == run.values(direction)


# ---- Methods whose silos take over what the server has counted (error_feedback.propose) ---------------------------


def losing(
    *lost: tuple[str, int], absent: Iterable[tuple[str, int]] = ()
) -> Callable[[TinyGrid], None]:
    """For ``prepare``: these (silo, round) train and keep their state, and the server leaves their replies out.

    Those that are ``absent`` do not train.
    """

    def after(silo: str, message: Message, reply: Message) -> Message:
        if (silo, round_of(message)) in lost and message.metadata.message_type == "train":
            del reply.content["metrics"]
        return reply

    def prepare(grid: TinyGrid) -> None:
        grid.after = after
        grid.absent.update(absent)

    return prepare


def confirmed(run: Run, silo: str, name: str) -> Tensor:
    """A silo's vector as of the last of its rounds that the server counted."""
    counted = run.strategy.state.numbers["counted"].get(silo, 0)
    arrays = run.grid.state(silo).arrays
    proposed = counted == max(rounds_trained(run, silo), default=0) > 0
    return arrays[f"proposed.{name}"] if proposed else arrays[name]
