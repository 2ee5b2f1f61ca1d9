"""Attacks on a silo's messages: reconstruction of patients' records (inversion), and counts of each class (labels).

``python -m benchmarks.privacy inversion labels``. The messages are those of real runs, taken from the in-process grid.
The attacker is the server. It has the network, the learning rate, the numbers of samples, batches and epochs, and the
order of the batches, which is drawn from seed, silo and round. It also gets the classes, as the worst case; `labels`
measures how well it could estimate them.

Two attacks on records. *Quotients*: a first fully connected layer's change of weights over its change of bias, unit by
unit; exact where one sample alone moved a unit (x = dW_i / db_i). *Matching* (Geiping et al. 2020, arXiv 2003.14053):
samples are moved until the same local training, simulated step by step, gives the same update; 1 - cosine, total
variation of pictures, Adam on the sign of the gradient. Reconstructions are assigned to true samples in the best way
that there is, which the attacker could not do.

*Error* is the squared distance to the true sample over the mean squared distance of the data set's samples to their
mean: a reconstruction that is the average patient has about 1. *Found*: the share of true samples whose reconstruction
is nearer than the nearest other patient of the whole data set; otherwise it does not identify a patient.
"""

from __future__ import annotations

import logging
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from flwr.app import Context, Message, MessageType
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from benchmarks.common import table
from client.app import app as client_app
from client.local_data import samples_on
from models.flat import FlatModel, gather, scatter
from models.initialisation import flat_model, initial_model
from models.standardisation import standardisation
from models.training import batches, generator, use_threads
from partitions.common.names import silo_name
from partitions.datasets.registry import load_dataset
from partitions.simulated import part_of
from server.run.loop import RoundLoop
from server.simulation.engine import InProcessGrid, flower_identity
from strategies.base.run_settings import RunSettings, parse_settings
from strategies.base.state import GLOBAL
from strategies.base.strategy import PersonalizedStrategy
from strategies.base.transport.payload import decode

SEED = 42
ITERATIONS = 300
PLAIN = {
    "threads": 1,
    "device": "cpu",
    "seed": SEED,
    "evaluate-every": 0,
    "learning-rate": 0.05,
}


# ---------------------------------------------------------------------------------------------------------------------
# Messages


@dataclass(frozen=True)
class SeenBySilo:
    """One silo's round at the server: the vectors that the silo received, and those that it sent."""

    round: int
    silo: str
    received: Mapping[str, Tensor]
    sent: Mapping[str, Tensor]


def watch(
    values: Mapping[str, Any], files: Mapping[str, Path] | None = None
) -> tuple[PersonalizedStrategy, list[SeenBySilo]]:
    """Run a simulation's silos, or these files, in this process; return the strategy and all messages at the server."""
    settings = parse_settings({**PLAIN, **values})
    seen: list[SeenBySilo] = []

    def tapped(message: Message, context: Context) -> Message:
        reply = client_app(message, context)
        if message.metadata.message_type == MessageType.TRAIN:
            (down, _), (up, _) = decode(message.content), decode(reply.content)
            first = next(iter(up.models.values()))
            models = [
                {name: model.vector for name, model in way.models.items()} for way in (down, up)
            ]
            seen.append(SeenBySilo(first.round, first.silo, *models))
        return reply

    grid = InProcessGrid(tapped, settings.common.silos, settings.flat())  # type: ignore[arg-type]
    for context, (name, file) in zip(
        grid.contexts.values(), (files or {}).items(), strict=False
    ):
        state = str(file.with_suffix(""))
        context.node_config = {
            "name": name,
            "data": str(file),
            "policy": "public",
            "state-dir": state,
        }
    with flower_identity():
        return RoundLoop(grid, settings).run(), seen


# ---------------------------------------------------------------------------------------------------------------------
# Records


@dataclass(frozen=True)
class Subject:
    """A standardised data set, with the distances to which errors are compared."""

    name: str
    x: Tensor  # (n, *shape)
    y: Tensor
    classes: int

    @property
    def spread(self) -> float:
        """Return the mean squared distance of a sample to the mean sample."""
        return float((self.x - self.x.mean(0)).flatten(1).square().sum(1).mean())

    def nearest_other(self, chosen: Sequence[int]) -> Tensor:
        """Return for each chosen sample the error of the data set's nearest other sample that is not equal."""
        distances = torch.cdist(self.x[list(chosen)].flatten(1), self.x.flatten(1)).square()
        return distances.masked_fill(distances < 1e-6, torch.inf).min(1).values / self.spread


def subject(name: str) -> Subject:
    """Load a whole built-in data set: tables standardised by column, pictures by one mean and standard deviation."""
    parts = load_dataset(name, "")
    x = torch.from_numpy(np.concatenate([parts.train.x, parts.test.x]).astype(np.float32))
    y = torch.from_numpy(np.concatenate([parts.train.y, parts.test.y]).astype(np.int64))
    if x.ndim == 2:
        return Subject(name, (x - x.mean(0)) / x.std(0), y, parts.classes)
    return Subject(name, ((x - x.mean()) / x.std()).permute(0, 3, 1, 2), y, parts.classes)


class Case(NamedTuple):
    """A silo with ``samples`` patients, trained for ``epochs`` in batches of ``batch``, attacked in this round."""

    samples: int
    batch: int
    epochs: int
    round: int = 1


CASES = [Case(n, n, epochs) for n in (1, 8, 64) for epochs in (1, 5)]
CASES += [Case(64, 8, 1), Case(8, 8, 1, round=20)]
VICTIMS = {1: 8, 8: 2, 64: 1}  # number of attacked silos by their number of samples


def simulate(
    model: FlatModel, start: Tensor, x: Tensor, y: Tensor, steps: Sequence[Tensor], rate: float
) -> Tensor:
    """Return the model after these steps of SGD, differentiable with respect to x."""
    w = start.clone().requires_grad_()
    for index in steps:
        logits = torch.func.functional_call(
            model.module, model.layout.unflatten(w), (x[index],)
        )
        (gradient,) = torch.autograd.grad(
            F.cross_entropy(logits, y[index]), w, create_graph=True
        )
        w = w - rate * gradient
    return w


class Attack:
    """The attacks of a server on one silo's round."""

    def __init__(
        self,
        settings: RunSettings,
        strategy: PersonalizedStrategy,
        seen: SeenBySilo,
        case: Case,
        x: Tensor,
        y: Tensor,
    ) -> None:
        shape = self.shape = tuple(x.shape[1:])
        name, options = settings.model_for(shape)
        classes, c = int(str(strategy.plan.numbers["classes"])), settings.common
        self.model = flat_model(name, shape, classes, options, "cpu", None)
        self.y = y
        self.rate = c.learning_rate
        whole = [slice(0, self.model.layout.size)]
        self.parts = strategy.shared_parts() if hasattr(strategy, "shared_parts") else whole
        received, sent = seen.received[GLOBAL], next(iter(seen.sent.values()))
        if received.numel() != sent.numel():
            received = gather(received, self.parts)
        # In round 1 a silo's local parameters are known too: all silos start from the seed's model.
        start = initial_model(name, shape, classes, options, c.seed)("")
        self.start, self.update = scatter(start, self.parts, received), sent - received
        rng = generator(c.seed, seen.silo, seen.round, "train")
        self.steps = list(batches(case.samples, case.batch, case.epochs, rng))

    def again(self, x: Tensor) -> Tensor:
        """Return the update that the silo would have sent with these samples."""
        return gather(
            simulate(self.model, self.start, x, self.y, self.steps, self.rate) - self.start,
            self.parts,
        )

    def quotients(self) -> Tensor | None:
        """Return one candidate per unit of a first fully connected layer; None without one, or if it is not sent."""
        weight, bias = self.model.layout.parameters[:2]
        shared = any(p.start <= 0 and weight.stop <= p.stop for p in self.parts)
        if len(weight.shape) != 2 or not shared:
            return None
        change = scatter(torch.zeros_like(self.start), self.parts, self.update)
        slopes = change[weight.start : weight.stop].view(weight.shape)
        offsets = change[bias.start : bias.stop]
        moved = offsets.abs() > 1e-6 * offsets.abs().max()
        return (slopes[moved] / offsets[moved, None]).view(-1, *self.shape)

    def matching(self, smooth: float) -> Tensor:
        """Return samples whose training approximately gives the sent update, found by iteration."""
        x = torch.randn(
            (len(self.y), *self.shape), generator=torch.Generator().manual_seed(SEED)
        ).requires_grad_()
        optimizer = torch.optim.Adam([x], lr=0.1)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, ITERATIONS)
        for _ in range(ITERATIONS):
            loss = 1 - F.cosine_similarity(self.again(x), self.update, dim=0)
            if smooth:
                loss = loss + smooth * (
                    x.diff(dim=-1).abs().mean() + x.diff(dim=-2).abs().mean()
                )
            (gradient,) = torch.autograd.grad(loss, x)
            x.grad = gradient.sign()
            optimizer.step()
            schedule.step()
        return x.detach()


def assigned(candidates: Tensor, true: Tensor) -> Tensor:
    """Return for each true sample the squared distance to its assigned reconstruction; inf without one."""
    distances = torch.cdist(true.flatten(1), candidates.flatten(1)).square()
    rows, columns = linear_sum_assignment(distances.numpy())
    result = torch.full((len(true),), torch.inf)
    result[torch.from_numpy(rows)] = distances[
        torch.from_numpy(rows), torch.from_numpy(columns)
    ]
    return result


def write_silos(
    data: Subject, case: Case, folder: Path
) -> tuple[dict[str, Path], dict[str, list[int]]]:
    """Write silos with this number of patients each as files; return the files, and the samples in each."""
    silos = max(VICTIMS[case.samples], 2)
    order = torch.randperm(len(data.x), generator=torch.Generator().manual_seed(SEED)).tolist()
    files, chosen = {}, {}
    for k in range(silos):
        name = f"silo-{k + 1}"
        chosen_rows, rest = order[k * case.samples : (k + 1) * case.samples], order[-20:]
        parts = {"train": chosen_rows, "val": rest[:10], "test": rest[10:]}
        arrays = {f"x_{part}": data.x[rows].numpy() for part, rows in parts.items()}
        arrays |= {f"y_{part}": data.y[rows].numpy() for part, rows in parts.items()}
        files[name], chosen[name] = folder / f"{name}.npz", chosen_rows
        np.savez(files[name], classes=np.array(data.classes), **arrays)  # type: ignore[arg-type]
    return files, chosen


def invert(
    data: Subject, model: str, method: str, case: Case, more: Mapping[str, Any] | None = None
) -> list[list[str]]:
    """Return table rows with the results of each attack on the silos of this case; ``more``: settings of the runs."""
    values = {
        "strategy": method,
        "model": model,
        "normalization": "none",
        "rounds": case.round,
        "local-epochs": case.epochs,
        "batch-size": case.batch,
        "silos": max(VICTIMS[case.samples], 2),
        **({"lg-fedavg.layers": 1} if method == "lg-fedavg" else {}),
        **(more or {}),
    }
    with tempfile.TemporaryDirectory() as folder:
        files, chosen = write_silos(data, case, Path(folder))
        strategy, seen = watch(values, files)
    settings = parse_settings({**PLAIN, **values})
    errors: dict[str, list[float]] = {"quotients": [], "matching": []}
    mean, near = [], []
    for silo in list(files)[: VICTIMS[case.samples]]:
        true = data.x[chosen[silo]]
        message = next(s for s in seen if (s.round, s.silo) == (case.round, silo))
        attack = Attack(settings, strategy, message, case, true, data.y[chosen[silo]])
        candidates = {
            "quotients": attack.quotients(),
            "matching": attack.matching(0.01 if data.x.ndim == 4 else 0.0),
        }
        mean += ((true - data.x.mean(0)).flatten(1).square().sum(1) / data.spread).tolist()
        near += data.nearest_other(chosen[silo]).tolist()
        for name, x in candidates.items():
            if x is not None and len(x):
                x = x.clamp(float(data.x.min()), float(data.x.max())) if data.x.ndim == 4 else x
                errors[name] += (assigned(x, true) / data.spread).tolist()
    head = [
        f"{data.name}, {model}",
        method,
        str(case.samples),
        str(case.batch),
        str(case.epochs),
        str(case.round),
    ]
    lines = []
    for name, values_ in errors.items():
        if values_:
            hit = statistics.fmean(e < n for e, n in zip(values_, near, strict=True))
            numbers = [statistics.median(of) for of in (values_, mean, near)]
            lines.append([*head, name, f"{hit:.2f}", *(f"{number:.2g}" for number in numbers)])
    return lines


def inversion() -> str:
    table_of, pictures = subject("breast-cancer"), subject("digits")
    eight = [Case(8, 8, 1), Case(8, 8, 5)]
    plan = [(table_of, "mlp", "fedavg", CASES), (pictures, "mlp", "fedavg", CASES)]
    plan += [
        (
            pictures,
            "small-cnn",
            "fedavg",
            [Case(1, 1, 1), Case(1, 1, 5), Case(8, 8, 1), Case(8, 8, 5)],
        )
    ]
    plan += [
        (table_of, "mlp", method, [Case(1, 1, 1), *eight]) for method in ("fedper", "lg-fedavg")
    ]
    lines = []
    for data, model, method, cases in plan:
        for case in cases:
            lines += invert(data, model, method, case)
            print(lines[-1], file=sys.stderr)
    header = [
        "data, network",
        "method",
        "patients",
        "batch",
        "epochs",
        "round",
        "attack",
        "found",
        "error",
    ]
    return table(lines, [*header, "mean patient", "nearest other"])


# ---------------------------------------------------------------------------------------------------------------------
# Labels


def shares_from_bias(
    seen: SeenBySilo, model: FlatModel, others: Tensor, steps: int, rate: float
) -> Tensor:
    """Estimate the shares of the classes from the change of the last bias alone.

    A step changes it by -rate (mean p - c), with p the softmax of the batch and c its classes' shares. So c is about
    mean p + change / (rate steps). p is computed on other samples, by the models before and after.
    """
    before, after = seen.received[GLOBAL], next(iter(seen.sent.values()))
    _, bias = model.layout.linear_head()
    p = torch.zeros(bias.stop - bias.start)
    for vector in (before, after):
        model.load(vector)
        with torch.no_grad():
            p += model.module(others).softmax(1).mean(0) / 2
    c = (p + (after - before)[bias.start : bias.stop] / (rate * steps)).clamp(min=0)
    return c / c.sum()


def overlap(a: Tensor, b: Tensor) -> float:
    """Return the overlap of two histograms of sum 1: 1 for equal ones, 0 for no class in common."""
    return float(torch.minimum(a, b).sum())


def labels_of(
    dataset: str,
    model: str,
    epochs: int,
    rounds: Sequence[int],
    more: Mapping[str, Any] | None = None,
) -> list[str]:
    """Return the overlap of the estimated and the true histogram in these rounds, mean over silos."""
    values = {
        "dataset": dataset,
        "model": model,
        "local-epochs": epochs,
        "batch-size": 10,
        "silos": 12,
    }
    values |= {
        "partition": "dirichlet",
        "dirichlet.beta": 0.3,
        "rounds": max(rounds),
        **(more or {}),
    }
    settings = parse_settings({**PLAIN, **values})
    strategy, seen = watch(values)
    parts = {silo_name(i): part_of(settings.division, i) for i in range(12)}
    shape, classes = next(iter(parts.values())).input_shape, next(iter(parts.values())).classes
    name, options = settings.model_for(shape)
    network = flat_model(name, shape, classes, options, "cpu", None)
    agreed = [
        standardisation(p.train.x, settings.common.normalization, strategy.plan.numbers)
        for p in parts.values()
    ]
    samples = [
        samples_on(p, torch.device("cpu"), a, ((), ()))[0][2]
        for p, a in zip(parts.values(), agreed, strict=True)
    ]
    others = torch.cat([test.take(slice(None))[0] for test in samples])
    true = {
        n: torch.bincount(torch.from_numpy(p.train.y), minlength=classes)
        for n, p in parts.items()
    }
    overlaps: dict[int, list[float]] = {r: [] for r in rounds}
    for s in (s for s in seen if s.round in overlaps):
        n = int(true[s.silo].sum())
        shares = shares_from_bias(
            s, network, others, epochs * -(-n // 10), settings.common.learning_rate
        )
        overlaps[s.round].append(overlap(shares, true[s.silo] / n))
    everyone = torch.stack(list(true.values())).sum(0).float()
    guess = statistics.fmean(
        overlap(everyone / everyone.sum(), t / t.sum()) for t in true.values()
    )
    return [
        f"{dataset}, {model}",
        str(epochs),
        *(f"{statistics.fmean(overlaps[r]):.2f}" for r in rounds),
        f"{guess:.2f}",
    ]


def labels() -> str:
    rounds = (1, 2, 5, 20)
    subjects = [("breast-cancer", "mlp"), ("digits", "mlp"), ("digits", "small-cnn")]
    lines = [labels_of(*case, epochs, rounds) for case in subjects for epochs in (1, 2, 5)]
    return table(
        lines,
        ["data, network", "epochs", *(f"round {r}" for r in rounds), "guess: all silos' mean"],
    )


MEASURED = {"inversion": inversion, "labels": labels}


def main(arguments: Sequence[str]) -> None:
    use_threads(1)
    logging.disable(logging.WARNING)
    unknown = [a for a in arguments if a not in MEASURED]
    if unknown or not arguments:
        raise SystemExit(f"python -m benchmarks.privacy {' '.join(MEASURED)}: one or both")
    for name in arguments:
        print(MEASURED[name]())


if __name__ == "__main__":
    main(sys.argv[1:])
