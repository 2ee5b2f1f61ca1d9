"""Effect of one or three attackers among twelve silos, by aggregation rule, and the cost of a rule for honest silos.

``python -m benchmarks.robustness attacks [RULE...]``, ``masks [RULE...]``, ``methods [METHOD...]``, ``cost``,
``centres [SEED...]``, ``ratios [METHOD...]`` and ``steps [METHOD...]``.
*attacks*: FedAvg; *masks*: one attacker on digits with sums in place of updates (``secure-robust``): it cuts nothing,
and sends what it likes; *methods*: every method with a mean under ``screen``, one attacker on digits. 12 silos,
``dirichlet.beta = 1``, ``mlp``, 10 rounds; the number is the mean test accuracy of the honest silos in percent, of the
snapshot that the method evaluates, in the closing exchange where that is the received model, else in the last round.
The data sets are digits, breast-cancer and 2000 pictures of fashion-mnist. The attackers are the first silos by name;
they change what their silo sends, v, or its step v - c from what it was sent, c, or the data it trains on:

    sign-flip   -v of every vector        noise       v + a normal vector of 10 times v's length
    x10         10 v                      label-flip  label y becomes C - 1 - y
    lied n      the data summary says n = 10⁶, the labels are flipped
    -45 steps   c - 45 (v - c), and n = 10⁶
    backdoor    every sample comes a second time with its brightest corner, as class 0, and the step is sent tenfold;
                the number behind the stroke is the share of honest silos' other samples that the corner turns into 0
    drift       the honest step and one of the same length in a direction that all attackers share, the same each round
    collusion   all attackers send c - L u, u the direction of the honest silos' mean step of this round, which they
                know, L their median length times 10, the bound of ``clip``; or times 1.4, within every bound
    own steps   c - (v - c), and c + 9 (v - c)

*steps*: over honest runs the largest distance of a received model from the silo's own last one, in lengths of that
(``step`` of a study). *cost*: what ``screen`` changes in honest runs, in points, paired over seeds.
*centres*: of FedAvg's silo-rounds on tables of real centres, all honest, how many ``screen`` leaves out and cuts.
*ratios*: over honest runs the largest step of a silo, in the measure of ``robust-clip`` (strategies/base/robust.py).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from flwr.app import Context, Message, MessageType
from torch import Tensor

from benchmarks.common import final_scores, print_table, whole_run
from benchmarks.reference_cells import COHORTS, CONTROL, SETS
from client import local_data
from client.app import app as client_app
from models.initialisation import flat_model
from models.samples import Samples
from models.training import predict
from partitions.common import messages
from partitions.common.errors import UserError
from partitions.common.names import silo_name
from partitions.datasets.registry import load_dataset
from partitions.simulated import part_of
from partitions.splits import SiloData, Split
from server.run.loop import RoundLoop
from server.simulation.engine import InProcessGrid, flower_identity
from strategies import strategies
from strategies.base.aggregation import bounded, secure
from strategies.base.run_settings import RunSettings, parse_settings
from strategies.base.settings import Common
from strategies.base.silo import Silo
from strategies.base.state import GLOBAL
from strategies.base.transport.payload import Model, array_record, tensor_of

SILOS, TARGET = 12, 0
RUN: dict[str, Any] = {
    "threads": 1,
    "device": "cpu",
    "dataset": "digits",
    "partition": "dirichlet",
    "dirichlet.beta": 1.0,
    "silos": SILOS,
    "model": "mlp",
    "mlp.hidden": "32",
    "rounds": 10,
    "batch-size": 10,
    "local-epochs": 2,
    "evaluate-every": 10,
    "min-metric-samples": 1,
    "apple.common-init": True,
    "apple.dr-learning-rate": 0.01,
}


# ---------------------------------------------------------------------------------------------------------------------
# Attackers


def noise(vector: Tensor, start: Tensor) -> Tensor:
    random = torch.randn(vector.shape, generator=torch.Generator().manual_seed(vector.numel()))
    return vector.add(random, alpha=float(10 * vector.norm() / random.norm()))


def drift(vector: Tensor, start: Tensor) -> Tensor:
    direction = torch.randn(vector.shape, generator=torch.Generator().manual_seed(7))
    return vector.add(direction, alpha=float((vector - start).norm() / direction.norm()))


def step_times(factor: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda vector, start: start + factor * (vector - start)


# What an attacker sends in place of its vector, and of the one that it was sent
SENT: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sign-flip": lambda vector, start: -vector,
    "x10": lambda vector, start: 10 * vector,
    "x100": lambda vector, start: 100 * vector,
    "noise": noise,
    "drift": drift,
    "-45 steps": step_times(-45),
    "backdoor": step_times(10),
    "own steps -1": step_times(-1),
    "own steps 9": step_times(9),
}
AGAINST: Mapping[str, float] = {"collusion 10": 10, "collusion 1.4": 1.4}
ATTACKS = (
    *("sign-flip", "x10", "-45 steps", "noise", "lied n", "label-flip", "backdoor", "drift"),
    *(*AGAINST, "own steps -1", "own steps 9"),
)


class Colluding(InProcessGrid):
    """Grid whose first ``liars`` nodes send a step of ``factor`` median lengths against the others' mean step."""

    liars, factor = 0, 0.0

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        ids = list(message_ids)
        requests = {self.sent[i].metadata.dst_node_id: self.sent[i] for i in ids}
        replies = list(super().pull_messages(ids))
        by_node = {
            reply.metadata.src_node_id: reply
            for reply in replies
            if reply.metadata.message_type == MessageType.TRAIN and not reply.has_error()
        }
        honest = [n for n in by_node if n > self.liars]
        if not self.factor or not honest:
            return replies
        for key in list(by_node[honest[0]].content.array_records):
            sent = {n: vector_of(by_node[n], key, requests[n]) for n in by_node}
            starts = {n: start_of(requests[n], vector) for n, vector in sent.items()}
            steps = torch.stack([sent[n] - starts[n] for n in honest])
            mean = steps.mean(0)
            lie = mean * (-self.factor * float(steps.norm(dim=1).median() / mean.norm()))
            for n in by_node.keys() - honest:
                replace_vector(by_node[n], key, requests[n], starts[n] + lie)
        return replies


def vector_of(reply: Message, key: str, message: Message) -> Tensor:
    """Return a vector of a reply; of integers, the vector that they stand for."""
    record = reply.content.array_records[key]
    if key != messages.MASKED:
        return tensor_of(record["vector"])
    step = tensor_of(record[messages.INTEGERS]).view(torch.int32) / per_unit(message)
    return start_of(message, step) + step.float()


def replace_vector(reply: Message, key: str, message: Message, vector: Tensor) -> None:
    """Put another vector into a reply; as integers, uncut."""
    if key != messages.MASKED:
        reply.content[key] = array_record({"vector": vector})
        return
    integers = ((vector - start_of(message, vector)).double() * per_unit(message)).round_()
    integers = integers.remainder_(2**32).long().to(torch.uint32)
    reply.content[key] = array_record({messages.INTEGERS: integers})


def per_unit(message: Message) -> float:
    """Return a silo's integers per unit of its step."""
    config, info = message.content.config_records["config"], strategies()["fedavg"].info
    start = tensor_of(message.content.array_records[f"model.{GLOBAL}"]["vector"])
    common = Common(secure_aggregation=True)
    _, clip = secure.bounds(info, common, {GLOBAL: Model(start)}, "model", len(start))
    return secure.scale(int(str(config["participants"])), clip) * float(
        str(config[messages.SHARE])
    )


def start_of(message: Message, vector: Tensor) -> Tensor:
    """Return the model that a silo received, or 0 where its sent vector has another length."""
    if record := message.content.array_records.get(f"model.{GLOBAL}"):
        start = tensor_of(record["vector"])
        if start.shape == vector.shape:
            return start
    return torch.zeros_like(vector)


def cornered(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return pictures (n, h, w, c) with the first 3 x 3 points at the maximum; for tables the first 3 columns."""
    marked = x.copy()
    marked[(slice(None), slice(3), *[slice(3)] * (x.ndim > 2))] = (
        np.iinfo(x.dtype).max if x.dtype == np.uint8 else x.max(initial=0)
    )
    return marked


def poisoned(attack: str, data: SiloData, classes: int) -> SiloData:
    """Return an attacker's data with what it trains on."""
    x, y = data.train.x, data.train.y
    if attack in ("label-flip", "lied n"):
        y = classes - 1 - y
    elif attack == "backdoor":
        x, y = np.concatenate([x, cornered(x)]), np.concatenate([y, np.full_like(y, TARGET)])
    return replace(data, train=Split(x, y))


@dataclass
class AttackedFederation:
    """Twelve silos in this process, of which the first ``liars`` perform ``attack``."""

    settings: RunSettings
    attack: str
    liars: int

    def run(self) -> None:
        self.parts = [part_of(self.settings.division, i) for i in range(SILOS)]
        self.classes = 1 + max(int(part.train.y.max()) for part in self.parts)
        for i in range(self.liars):
            self.parts[i] = poisoned(self.attack, self.parts[i], self.classes)
        grid = Colluding(self.app, SILOS, self.settings.flat())  # type: ignore[arg-type]
        grid.liars, grid.factor = self.liars, AGAINST.get(self.attack, 0.0)
        self.loop, self.contexts = RoundLoop(grid, self.settings), grid.contexts.values()
        with flower_identity(), mock.patch.object(local_data, "part_of", self.part):
            self.strategy = self.loop.run()

    def part(self, division: object, index: int) -> SiloData:
        return self.parts[index]

    def app(self, message: Message, context: Context) -> Message:
        reply = client_app(message, context)
        if context.node_id > self.liars or reply.has_error():
            return reply
        kind, lies = message.metadata.message_type, self.attack in ("lied n", "-45 steps")
        if kind == MessageType.QUERY and lies:
            next(iter(reply.content.config_records.values()))["n_train"] = 10**6
        for key in list(reply.content.array_records) if kind == MessageType.TRAIN else ():
            vector = vector_of(reply, key, message)
            if change := SENT.get(self.attack):
                vector = change(vector, start_of(message, vector))
            replace_vector(reply, key, message, vector)
        return reply

    def honest(self) -> float:
        """Return the mean test accuracy of the honest silos, in percent."""
        scores = final_scores(self.loop)
        values = [scores.get(silo_name(i), 0.0) for i in range(self.liars, SILOS)]
        return 100 * float(np.mean(np.nan_to_num(values)))

    def turned(self) -> float:
        """Return the percentage of honest silos' test samples of other classes that the corner turns into the target.

        Predictions are of the model that the method evaluates if it is common to all, else of each silo's personal one.
        """
        shape = self.parts[0].input_shape
        name, options = self.settings.model_for(shape)
        model = flat_model(name, shape, self.classes, options, "cpu")
        shared = self.strategy.state.arrays.get(GLOBAL, torch.empty(0))
        is_shared = self.strategy.info.reports == "received" and len(shared) == len(
            model.vector
        )
        hits = total = 0
        for part, context in list(zip(self.parts, self.contexts, strict=True))[self.liars :]:
            arrays: Any = context.state["arrays"]
            model.load(shared if is_shared else tensor_of(arrays["personal"]))
            others = part.test.y != TARGET
            samples = Samples(cornered(part.test.x[others]), part.test.y[others])
            hits += int((predict(model, samples).argmax(1) == TARGET).sum())
            total += len(samples)
        return 100 * hits / max(total, 1)


def cell(strategy: str, attack: str, liars: int, **changes: Any) -> str:
    """Return one cell of the table: the accuracy, and for the backdoor its success rate."""
    options = {k.replace("_", "-"): v for k, v in changes.items()}
    run = parse_settings({**RUN, "strategy": strategy, **options})
    federation = AttackedFederation(run, attack, liars)
    try:
        federation.run()
    except RuntimeError:  # no usable update is left
        return "stops"
    score = f"{federation.honest():.1f}"
    return f"{score} / {federation.turned():.0f}" if attack == "backdoor" else score


RULES_TRIED = (
    "screen",
    "clip",
    "geometric-median",
    "multi-krum",
    "trimmed-mean",
    "median",
    "krum",
    "none",
)
# Of one liar, over the rules and data sets of FedAvg's table
WORST = ("sign-flip", "-45 steps", "noise", "lied n")


def pictures(folder: Path) -> str:
    """Write 2000 pictures of fashion-mnist as a data file."""
    data = load_dataset("fashion-mnist")
    np.savez(file := folder / "fashion-mnist.npz", x=data.train.x[:2000], y=data.train.y[:2000])
    return str(file)


Row = list[Any]
MASKED: Mapping[str, Any] = {"secure-aggregation": True, "secure-group": 3}


def attacked(
    labels: Row, liars: int, tried: Sequence[str], method: str = "fedavg", **options: Any
) -> Row:
    """Return a row: a method without an attack, and with each that is tried."""
    cells = (cell(method, attack, liars, **options) for attack in ("no attack", *tried))
    return [*labels, *cells]


def attacks(rules: Sequence[str]) -> Iterator[Row]:
    """Yield for FedAvg a row per rule, data set and number of attackers."""
    with tempfile.TemporaryDirectory() as folder:
        sets = {"digits": "digits", "breast-cancer": "breast-cancer"}
        sets["fashion-mnist"] = pictures(Path(folder))
        every = itertools.product(rules or RULES_TRIED, sets.items(), (1, 3))
        for rule, (title, dataset), liars in every:
            settings: dict[str, Any] = {"dataset": dataset, "robust": rule}
            settings["robust-attackers"] = liars
            yield attacked([title, liars, rule], liars, ATTACKS, **settings)


def masks(rules: Sequence[str]) -> Iterator[Row]:
    """Yield for FedAvg on digits, with one attacker, a row per rule: sums of all, and of groups of three."""
    for rule, seed in itertools.product(rules or ("all", "screen"), (42, 1, 2)):
        robust = {"robust": rule, "secure-robust": "groups"} if rule != "all" else {}
        yield attacked([rule, seed], 1, ATTACKS, **MASKED, **robust, seed=seed)


def methods(names: Sequence[str]) -> Iterator[Row]:
    """Yield a row for every method with one mean of whole vectors under ``screen``, with one attacker on digits."""
    means = [
        name
        for name, method in sorted(strategies().items())
        if bounded.steps_are_comparable(method.info) and not method.info.role.pooled
    ]
    for name in names or means:
        with contextlib.suppress(UserError):  # fedbn without its layers
            yield attacked([name], 1, WORST, name, robust="screen")


COSTS = (
    *(("digits", 1.0, 10), ("digits", 0.5, 10), ("digits", 0.1, 10), ("digits", 0.1, 40)),
    *(("breast-cancer", 1.0, 10), ("breast-cancer", 1.0, 40)),
)


def cost(seeds: Sequence[str]) -> Iterator[Row]:
    """Yield honest runs with ``screen`` minus those with ``none``: mean and standard error over seeds, in points."""
    for dataset, beta, rounds in COSTS:
        scores = {rule: list[float]() for rule in ("none", "screen")}
        for seed, rule in itertools.product(map(int, seeds or "12345"), scores):
            settings = {**RUN, "dataset": dataset, "dirichlet.beta": beta, "seed": seed}
            settings |= {"strategy": "fedavg", "rounds": rounds, "evaluate-every": rounds}
            settings |= {"robust": rule, "weight-cap": 5.0 if rule == "screen" else 0.0}
            of_silos = final_scores(whole_run(settings)).values()
            scores[rule].append(100 * float(np.mean(list(of_silos))))
        change = np.subtract(scores["screen"], scores["none"])
        error = change.std(ddof=1) / len(change) ** 0.5
        cells = [f"{np.mean(scores['none']):.1f}", f"{change.mean():+.2f} ± {error:.2f}"]
        yield [dataset, f"{beta:g}", rounds, *cells]


# ---------------------------------------------------------------------------------------------------------------------
# Measures of honest silos


CENTRES = {name: SETS[name] for name in (*COHORTS, CONTROL)} | {"heart-disease": 4}


def honest_rounds(dataset: str, seeds: Iterable[int], **changes: Any) -> tuple[int, int, int]:
    """Return silo-rounds of FedAvg in 10 rounds with ``screen``: all, those left out, and those cut."""
    silos, bounded = CENTRES[dataset], list[float]()
    settings = {"dataset": dataset, "partition": "natural", "silos": silos, "robust": "screen"}
    settings |= {"strategy": "fedavg", "rounds": 10, "threads": 1, "evidence": "off", **changes}
    for seed in (seeds := list(seeds)):
        rows = whole_run({**settings, "seed": seed}).history.rows
        bounded += [row.value for row in rows if row.metric == "bounded"]
    out = bounded.count(0.0)
    return 10 * silos * len(seeds), out, len(bounded) - out


def centres(seeds: Sequence[str]) -> Iterator[Row]:
    """Yield per table of real centres the silo-rounds, and the shares left out and cut, in percent."""
    for dataset in CENTRES:
        total, out, cut = honest_rounds(dataset, map(int, seeds or "01234"))
        yield [dataset, total, 100 * out / total, 100 * cut / total]


PARTITIONS: Mapping[str, Mapping[str, Any]] = {
    "digits, dirichlet 0.5": {"dirichlet.beta": 0.5},
    "digits, dirichlet 0.1": {"dirichlet.beta": 0.1},
    "digits, pathological": {"partition": "pathological"},
    "heart-disease": {"dataset": "heart-disease", "partition": "natural", "silos": 4},
}


def measured(
    methods: Sequence[str], rounds: int, kinds: Iterable[Mapping[str, Any]], values: list[float]
) -> Iterator[tuple[str, list[list[float]]]]:
    """Yield for each method what ``values`` got in runs of these kinds; nothing for what a method refuses."""
    for method in methods or sorted(strategies()):
        of_kinds = []
        for changes in kinds:
            values.clear()
            run = {**RUN, "rounds": rounds, "evaluate-every": 0, **changes, "strategy": method}
            with contextlib.suppress(UserError):
                whole_run(run)
            of_kinds.append([*values])
        if any(map(any, of_kinds)):
            yield method, of_kinds


def ratios(methods: Sequence[str]) -> Iterator[Row]:
    """Yield per method and partition an honest silo's largest step over its measure, in 20 rounds and all vectors."""
    largest: list[float] = []
    real = bounded.outliers

    def outliers(norms: Any, measures: Any, factor: float) -> dict[str, dict[str, float]]:
        ratios = real(norms, measures, 1e-9)
        largest.extend(ratio for of in ratios.values() for ratio in of.values())
        return {}

    with mock.patch.object(bounded, "outliers", outliers):
        for method, kinds in measured(methods, 20, PARTITIONS.values(), largest):
            yield [method, *(max(of, default="") for of in kinds)]


STEPS_OF: Sequence[Mapping[str, Any]] = (
    {},
    {"dirichlet.beta": 0.1},
    {"learning-rate": 0.2, "local-epochs": 5},
)


def steps(methods: Sequence[str]) -> Iterator[Row]:
    """Yield per method the maximum and the 99th percentile over silos and 8 rounds of three kinds of run."""
    distances: list[float] = []

    def note(
        silo: str, this: int, received: Tensor, last: Tensor, most: float, *, first: bool
    ) -> None:
        if not first:
            distances.append(float((received - last).norm() / last.norm()))

    def allowed(*parts: Any, **more: Any) -> Silo:
        return Silo(*parts, **{**more, "max_step": 1e9})

    with (
        mock.patch("strategies.base.silo.check_received", note),
        mock.patch("client.session.Silo", allowed),
        # It notes a choice in a state directory, which simulated silos lack
        mock.patch("client.app.claim_model"),
    ):
        for method, kinds in measured(methods, 8, STEPS_OF, distances):
            every = np.concatenate(kinds)
            yield [method, *(float(np.quantile(every, q)) for q in (1.0, 0.99))]


# The columns of each part, and its rows
PARTS: Mapping[str, tuple[Sequence[str], Callable[[Sequence[str]], Iterator[Row]]]] = {
    "attacks": (("data", "attackers", "robust", "no attack", *ATTACKS), attacks),
    "masks": (("robust", "seed", "no attack", *ATTACKS), masks),
    "methods": (("method", "no attack", *WORST), methods),
    "cost": (("data", "dirichlet.beta", "rounds", "none", "screen - none"), cost),
    "centres": (("data", "silo-rounds", "left out", "cut"), centres),
    "ratios": (("method", *PARTITIONS), ratios),
    "steps": (("method", "largest", "99 of 100"), steps),
}


if __name__ == "__main__":
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    columns, part = PARTS[sys.argv[1]]
    print_table(" | ".join(columns), part(sys.argv[2:]))
