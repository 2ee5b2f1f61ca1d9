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
import math
import statistics
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
from torch.func import functional_call

from benchmarks.common import command_line, print_table
from client.app import app as client_app
from client.local_data import samples_on
from models.flat import FlatModel, gather, scatter
from models.initialisation import flat_model, initial_model
from models.standardisation import standardisation
from models.training import batches, generator, use_threads
from partitions.common.names import silo_name
from partitions.datasets.registry import load_dataset
from partitions.npz import write_npz
from partitions.simulated import part_of
from partitions.splits import SPLITS
from server.run.loop import RoundLoop
from server.simulation.engine import InProcessGrid, flower_identity
from strategies.base.run_settings import RunSettings, parse_settings
from strategies.base.state import GLOBAL
from strategies.base.strategy import PersonalizedStrategy
from strategies.base.transport.payload import Model, decode

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
    """One silo's round at the server: the models that the silo received, and those that it sent."""

    round: int
    silo: str
    received: Mapping[str, Model]
    sent: Mapping[str, Model]


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
            seen.append(SeenBySilo(first.round, first.silo, down.models, up.models))
        return reply

    grid = InProcessGrid(tapped, settings.common.silos, settings.flat())  # type: ignore[arg-type]
    for context, (name, file) in zip(
        grid.contexts.values(), (files or {}).items(), strict=False
    ):
        state = str(file.with_suffix(""))
        config = {"name": name, "data": str(file), "policy": "public", "state-dir": state}
        context.node_config = dict(config)
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

    @property
    def silos(self) -> int:
        return max(VICTIMS[self.samples], 2)


CASES = [Case(n, n, epochs) for n in (1, 8, 64) for epochs in (1, 5)]
CASES += [Case(64, 8, 1), Case(8, 8, 1, round=20)]
VICTIMS = {1: 8, 8: 2, 64: 1}  # number of attacked silos by their number of samples


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
        self.model = flat_model(name, shape, classes, options, "cpu")
        self.y = y
        self.rate = c.learning_rate
        whole = [slice(0, self.model.layout.size)]
        self.parts = strategy.shared_parts() if hasattr(strategy, "shared_parts") else whole
        received, sent = seen.received[GLOBAL].vector, next(iter(seen.sent.values())).vector
        if received.numel() != sent.numel():
            received = gather(received, self.parts)
        # In round 1 a silo's local parameters are known too: all silos start from the seed's model.
        start = initial_model(name, shape, classes, options, c.seed)("")
        self.start, self.update = scatter(start, self.parts, received), sent - received
        rng = generator(c.seed, seen.silo, seen.round, "train")
        self.steps = list(batches(case.samples, case.batch, case.epochs, rng))

    def again(self, x: Tensor) -> Tensor:
        """Return the update that the silo would have sent with these samples, differentiable with respect to x."""
        w = self.start.clone().requires_grad_()
        for index in self.steps:
            parameters = self.model.layout.unflatten(w)
            logits = functional_call(self.model.module, parameters, (x[index],))
            loss = F.cross_entropy(logits, self.y[index])
            (gradient,) = torch.autograd.grad(loss, w, create_graph=True)
            w = w - self.rate * gradient
        return gather(w - self.start, self.parts)

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
    result[rows] = distances[rows, columns]
    return result


def write_silos(
    data: Subject, case: Case, folder: Path
) -> tuple[dict[str, Path], dict[str, list[int]]]:
    """Write silos with this number of patients each as files; return the files, and the samples in each."""
    order = torch.randperm(len(data.x), generator=torch.Generator().manual_seed(SEED)).tolist()
    files, chosen = {}, {}
    for k in range(case.silos):
        name = f"silo-{k + 1}"
        chosen[name] = order[k * case.samples : (k + 1) * case.samples]
        arrays = {"classes": np.array(data.classes)}
        for part, rows in zip(SPLITS, (chosen[name], order[-20:-10], order[-10:]), strict=True):
            arrays |= {f"x_{part}": data.x[rows].numpy(), f"y_{part}": data.y[rows].numpy()}
        files[name] = folder / f"{name}.npz"
        write_npz(files[name], arrays)
    return files, chosen


class AttackResult(NamedTuple):
    """What an attack reconstructs: the share of samples found, and median errors in two digits.

    ``errors``: of the reconstruction, of the mean patient, and of the nearest other one.
    """

    attack: str
    hits: float
    errors: list[str]


def invert(
    data: Subject, model: str, method: str, case: Case, more: Mapping[str, Any] | None = None
) -> list[AttackResult]:
    """Return the results of each attack on the silos of this case; ``more``: settings of the runs."""
    values = {
        "strategy": method,
        "model": model,
        "normalization": "none",
        "rounds": case.round,
        "local-epochs": case.epochs,
        "batch-size": case.batch,
        "silos": case.silos,
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
        is_picture = data.x.ndim == 4
        candidates = attack.quotients(), attack.matching(0.01 if is_picture else 0.0)
        mean += ((true - data.x.mean(0)).flatten(1).square().sum(1) / data.spread).tolist()
        near += data.nearest_other(chosen[silo]).tolist()
        for of, x in zip(errors.values(), candidates, strict=True):
            if x is not None and len(x):
                x = x.clamp(data.x.min(), data.x.max()) if is_picture else x
                of += (assigned(x, true) / data.spread).tolist()
    results = []
    for name, of in errors.items():
        if of:
            hits = statistics.fmean(np.less(of, near))
            medians = [f"{statistics.median(each):.2g}" for each in (of, mean, near)]
            results.append(AttackResult(name, hits, medians))
    return results


def inversion() -> None:
    tumours, digits = subject("breast-cancer"), subject("digits")
    plan = [(tumours, "mlp", "fedavg", CASES), (digits, "mlp", "fedavg", CASES)]
    plan += [(digits, "small-cnn", "fedavg", CASES[:4])]
    plan += [
        (tumours, "mlp", method, [CASES[0], *CASES[2:4]]) for method in ("fedper", "lg-fedavg")
    ]
    rows = (
        [f"{data.name}, {model}", method, *case, result.attack, result.hits, *result.errors]
        for data, model, method, cases in plan
        for case in cases
        for result in invert(data, model, method, case)
    )
    header = (
        "data, network | method | patients | batch | epochs | round | attack | found | error"
    )
    print_table(f"{header} | average patient | nearest other patient", rows)


# ---------------------------------------------------------------------------------------------------------------------
# Labels


ROUNDS = (1, 2, 5, 20)
LABELS_HEADER = "round 1 | round 2 | round 5 | round 20 | guess: all silos' mean"


def shares_from_bias(
    seen: SeenBySilo, model: FlatModel, others: Tensor, steps: int, rate: float
) -> Tensor:
    """Estimate the shares of the classes from the change of the last bias alone.

    A step changes it by -rate (mean p - c), with p the softmax of the batch and c its classes' shares. So c is about
    mean p + change / (rate steps). p is computed on other samples, by the models before and after.
    """
    before, after = seen.received[GLOBAL].vector, next(iter(seen.sent.values())).vector
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
    dataset: str, model: str, epochs: int, more: Mapping[str, Any] | None = None
) -> list[float]:
    """Return the overlap of the estimated and the true histogram in each of :data:`ROUNDS`, and a guess's; means."""
    values = {
        "dataset": dataset,
        "model": model,
        "local-epochs": epochs,
        "batch-size": 10,
        "silos": 12,
        "partition": "dirichlet",
        "dirichlet.beta": 0.3,
        "rounds": max(ROUNDS),
        **(more or {}),
    }
    settings = parse_settings({**PLAIN, **values})
    strategy, seen = watch(values)
    parts = {silo_name(i): part_of(settings.division, i) for i in range(12)}
    first = parts[silo_name(0)]
    name, options = settings.model_for(first.input_shape)
    network = flat_model(name, first.input_shape, first.classes, options, "cpu")
    tests, true = [], {}
    for silo, part in parts.items():
        agreed = standardisation(
            part.train.x, settings.common.normalization, strategy.plan.numbers
        )
        (_, _, test), _ = samples_on(part, torch.device("cpu"), agreed, ((), ()))
        tests.append(test.take(slice(None))[0])
        true[silo] = torch.bincount(torch.from_numpy(part.train.y), minlength=first.classes)
    others = torch.cat(tests)
    overlaps: dict[int, list[float]] = {r: [] for r in ROUNDS}
    for s in (s for s in seen if s.round in overlaps):
        n = int(true[s.silo].sum())
        steps = epochs * math.ceil(n / 10)
        shares = shares_from_bias(s, network, others, steps, settings.common.learning_rate)
        overlaps[s.round].append(overlap(shares, true[s.silo] / n))
    everyone = torch.stack(list(true.values())).sum(0).float()
    guess = [overlap(everyone / everyone.sum(), t / t.sum()) for t in true.values()]
    return [statistics.fmean(of) for of in (*overlaps.values(), guess)]


def labels() -> None:
    subjects = [("breast-cancer", "mlp"), ("digits", "mlp"), ("digits", "small-cnn")]
    rows = (
        [f"{dataset}, {model}", epochs, *labels_of(dataset, model, epochs)]
        for dataset, model in subjects
        for epochs in (1, 2, 5)
    )
    print_table(f"data, network | epochs | {LABELS_HEADER}", rows)


MEASURED = {"inversion": inversion, "labels": labels}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("parts", nargs="+", choices=MEASURED)
    use_threads(1)
    logging.disable(logging.WARNING)
    for name in parser.parse_args().parts:
        MEASURED[name]()


if __name__ == "__main__":
    main()
