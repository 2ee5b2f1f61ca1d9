"""Differential privacy, measured: `python -m benchmarks.dp audit|attacks|counts|accuracy [...]`.

`audit` prints all evidence, or the parts that its arguments name:

* `accountant`: epsilon of 50 settings compared with another accountant's, if installed (below);
* `step`: time and memory of a private step compared with a plain one, and with Opacus's, if it is in `OPACUS=DIR`;
* `canaries`: the one-run audit, with planted faults (`benchmarks.dp_audit`);
* `attacks`, `counts`: the attacks of `benchmarks.privacy` on messages with differential privacy;
* `accuracy [DATASET...]`: its cost in accuracy; half an hour for three data sets.

`accountant` needs dp-accounting 0.6.0 (Google's) in a separate environment, because it needs another version of attrs:

    python -m venv /tmp/dp && /tmp/dp/bin/pip install dp-accounting==0.6.0
    /tmp/dp/bin/python -m benchmarks.dp accountant
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parents[1] / "models" / "privacy" / "accountant.py"


def own_accountant() -> Any:
    """Load the accountant's file alone, because the environment of dp-accounting may lack PyTorch."""
    spec = spec_from_file_location("accountant", FILE)
    assert spec is not None and spec.loader is not None
    sys.modules["accountant"] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def settings() -> Iterator[tuple[float, float, int, float]]:
    """Yield 50 settings: noise multiplier, sample rate, steps, delta."""
    for noise in (0.7, 1.0, 1.5, 3.0, 8.0):
        for rate, steps in ((0.001, 5000), (0.01, 1000), (0.032, 600), (0.05, 400), (1.0, 8)):
            for delta in (1e-5, 1e-3):
                yield noise, rate, steps, delta


def accountant() -> str:
    """Compare epsilon of 50 settings by both accountants, and the noise for that epsilon.

    Also compare dp-accounting's privacy loss distributions, which are tighter than RDP: they must not be above ours.
    """
    if not find_spec("dp_accounting"):
        return "not done: dp_accounting is not installed here (benchmarks/dp.py says how)"
    ours, theirs = own_accountant(), import_module("dp_accounting")
    rdp, pld = import_module("dp_accounting.rdp"), import_module("dp_accounting.pld")
    worst = inverse = 0.0
    for noise, rate, steps, delta in settings():
        event = theirs.PoissonSampledDpEvent(rate, theirs.GaussianDpEvent(noise))
        oracle, tighter = rdp.RdpAccountant(ours.ORDERS), pld.PLDAccountant()
        oracle.compose(event, steps)
        tighter.compose(event, steps)
        wanted, least = oracle.get_epsilon(delta), tighter.get_epsilon(delta)
        epsilon = ours.epsilon(noise, rate, steps, delta)
        assert epsilon > least, (noise, rate, steps, delta)
        again = ours.noise_multiplier_for(epsilon, rate, steps, delta)
        worst = max(worst, abs(epsilon / wanted - 1))
        inverse = max(inverse, abs(again / noise - 1))
    return f"50 settings: largest difference {worst:.2%}; of the noise {inverse:.2%}"


# ---------------------------------------------------------------------------------------------------------------------
# Attacks, accuracy: these need the whole checkout


EPSILONS = (0.0, 8.0, 3.0, 1.0)  # 0: without differential privacy
HOSPITALS, ROUNDS = 3, 20
SIZES = (100, 1000, 5000)  # training samples of each hospital
METHODS = ("local", "fedavg", "fedper", "apple", "ditto", "gh-ofl")
ONE_MESSAGE = {"rounds": 1, "evaluate-every": 1, "gh-ofl.shrink": 0.3}
DATASETS = ("mnist", "fashion-mnist")


def private(epsilon: float) -> dict[str, object]:
    return {"dp": True, "dp.target-epsilon": epsilon} if epsilon else {}


def named(epsilon: float) -> str:
    return f"{epsilon:g}" if epsilon else "none"


def attacks() -> str:
    """Return the results of the inversion attacks on silos of 1, 8 and 64 patients, with one batch of all."""
    from benchmarks.common import table
    from benchmarks.privacy import Case, invert, subject

    lines = []
    for data, model in (
        (subject("breast-cancer"), "mlp"),
        (subject("digits"), "mlp"),
        (subject("digits"), "small-cnn"),
    ):
        for case in (Case(1, 1, 1), Case(8, 8, 1), Case(64, 64, 1))[
            : 2 if model == "small-cnn" else 3
        ]:
            for epsilon in EPSILONS:
                results = invert(data, model, "fedavg", case, private(epsilon))
                best = max(results, key=lambda line: (float(line[7]), -float(line[8])))
                lines.append([best[0], best[2], named(epsilon), *best[7:]])
                print(lines[-1], file=sys.stderr)
    header = [
        "data, network",
        "patients",
        "epsilon",
        "found",
        "error",
        "average patient",
        "nearest other patient",
    ]
    return table(lines, header)


def counts() -> str:
    """Return the results of the attack on class counts, by rounds; epsilon is for all 20 rounds."""
    from benchmarks.common import table
    from benchmarks.privacy import labels_of

    rounds, lines = (1, 2, 5, 20), []
    for model in ("mlp", "small-cnn"):
        for epsilon in EPSILONS:
            name, _, *values = labels_of("digits", model, 1, rounds, private(epsilon))
            lines.append([name, named(epsilon), *values])
    return table(
        lines,
        ["data, network", "epsilon", *(f"round {r}" for r in rounds), "guess: all silos' mean"],
    )


def accuracy(datasets: Sequence[str]) -> str:
    """Return the mean test accuracy of three hospitals after 20 rounds (`gh-ofl`: one), by size and epsilon."""
    from benchmarks.common import table

    lines = []
    for dataset in map(own_names, datasets):
        for size in SIZES:
            for method in METHODS:
                alone = method == "local"  # nothing leaves, whatever epsilon is
                cells = [
                    final(dataset, size, method, epsilon)
                    for epsilon in (EPSILONS[:1] if alone else EPSILONS)
                ]
                lines.append(
                    [
                        Path(dataset).stem,
                        f"{size}",
                        method,
                        *cells * (len(EPSILONS) if alone else 1),
                    ]
                )
                print(lines[-1], file=sys.stderr)
    header = [
        "data",
        "patients per hospital",
        "method",
        *(f"epsilon {named(e)}" for e in EPSILONS),
    ]
    return table(lines, header)


def own_names(dataset: str) -> str:
    """Return a data set's name; for a file with MedMNIST's arrays and others, a copy with MedMNIST's alone."""
    if not dataset.endswith(".npz"):
        return dataset
    import numpy as np

    with np.load(dataset) as arrays:
        kept = {
            key: arrays[key] for key in arrays.files if key.endswith(("_images", "_labels"))
        }
    file = Path(tempfile.mkdtemp()) / Path(dataset).name
    np.savez(
        file,
        **{
            key: value.ravel() if key.endswith("labels") else value
            for key, value in kept.items()
        },
    )
    return str(file)


def final(dataset: str, size: int, method: str, epsilon: float) -> str:
    """Return the score of one run in percent: 100 steps on a fifth of the patients each, a small network."""
    from benchmarks.common import whole_run
    from partitions.common.errors import DataError, UserError

    draw = "diversifed-dirichlet"
    values = {
        "strategy": method,
        "dataset": dataset,
        "partition": draw,
        "silos": HOSPITALS,
        "validation": 0.0,
        f"{draw}.train-size": size,
        f"{draw}.test-size": 300,
        f"{draw}.alpha": 0.5,
        "model": "mlp",
        "mlp.hidden": "32",
        "threads": 1,
        "device": "cpu",
        "seed": 42,
        "rounds": ROUNDS,
        "batch-size": size // 5,
        "evaluate-every": ROUNDS,
        "learning-rate": 0.1,
        "dp.clip-norm": 4.0,
        "normalization": "none",
        **(ONE_MESSAGE if method == "gh-ofl" else {}),
        **private(epsilon),
    }
    try:
        loop = whole_run(values)
    except (UserError, DataError):
        return "too few samples"
    reports = loop.settings.strategy.info.reports
    rounds = loop.settings.common.rounds
    last = rounds + 1 if reports == "received" else rounds
    scores = [
        row.value
        for row in loop.history.rows
        if (row.round, row.split, row.snapshot, row.metric)
        == (last, "test", reports, "accuracy")
    ]
    return f"{100 * sum(scores) / len(scores):.1f}"


def step() -> str:
    """Return the costs of a private step, and its difference from Opacus's."""
    from benchmarks.dp_step import CASES, costs

    if folder := os.environ.get("OPACUS", ""):
        sys.path.append(folder)
    lines = list(costs(tuple(CASES), 3, bool(folder)))
    return "\n".join(
        lines if folder else [*lines, "beside Opacus: not done, OPACUS names no folder"]
    )


PARTS: dict[str, Callable[[], str]] = {
    "accountant": accountant,
    "step": step,
    "canaries": lambda: "\n".join(import_module("benchmarks.dp_audit").lines(1000, 100, 2)),
    "attacks": attacks,
    "counts": counts,
    "accuracy": lambda: accuracy(DATASETS),
}


def audit(parts: Sequence[str]) -> str:
    """Return all evidence, or these parts of it, each under its name."""
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        raise SystemExit(
            f"python -m benchmarks.dp: {unknown[0]!r} is none of audit, {', '.join(PARTS)}"
        )
    texts = []
    for part in parts or PARTS:
        texts.append(f"## {part}\n\n{PARTS[part]()}\n")
        print(texts[-1], file=sys.stderr)
    return "\n".join(texts)


def measure(arguments: Sequence[str]) -> str:
    """Return the result for the command line's arguments. Raises SystemExit for invalid ones."""
    what, *rest = arguments or [""]
    if what == "accuracy" and rest:
        return accuracy(rest)
    return audit(rest if what == "audit" else [what])


if __name__ == "__main__":
    if find_spec("torch"):
        from models.training import use_threads

        use_threads(1)
        logging.disable(logging.WARNING)
    print(measure(sys.argv[1:]))
