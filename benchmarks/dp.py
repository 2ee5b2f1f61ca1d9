"""Differential privacy, measured: `python -m benchmarks.dp audit|attacks|counts|accuracy [...]`.

`audit` prints all evidence, or the parts that its arguments name:

* `accountant`: epsilon of 50 settings compared with another accountant's, if installed (below);
* `step`: time and memory of a private step compared with a plain one; its difference from Opacus's in `OPACUS=DIR`;
* `canaries`: the one-run audit, with planted faults (`benchmarks.dp_audit`);
* `attacks`, `counts`: the attacks of `benchmarks.privacy` on messages with differential privacy;
* `accuracy [DATASET...]`: its cost in accuracy; half an hour for three data sets.

`accountant` needs dp-accounting 0.6.0 (Google's) in a separate environment, because it needs another version of attrs:

    python -m venv /tmp/dp && /tmp/dp/bin/pip install dp-accounting==0.6.0
    /tmp/dp/bin/python -m benchmarks.dp accountant
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

# All else is imported where it is used: the environment of dp-accounting may lack PyTorch
from models.privacy import accountant as ours


def settings() -> Iterator[tuple[float, float, int, float]]:
    """Yield 50 settings: noise multiplier, sample rate, steps, delta."""
    for noise in (0.7, 1.0, 1.5, 3.0, 8.0):
        for rate, steps in ((0.001, 5000), (0.01, 1000), (0.032, 600), (0.05, 400), (1.0, 8)):
            for delta in (1e-5, 1e-3):
                yield noise, rate, steps, delta


def accountant() -> None:
    """Compare epsilon of 50 settings by both accountants, and the noise for that epsilon.

    Also compare dp-accounting's privacy loss distributions, which are tighter than RDP: they must not be above ours.
    """
    if not find_spec("dp_accounting"):
        print("not done: dp_accounting is not installed here (benchmarks/dp.py says how)")
        return
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.pld import PLDAccountant
    from dp_accounting.rdp import RdpAccountant

    worst = inverse = 0.0
    for noise, rate, steps, delta in settings():
        event = PoissonSampledDpEvent(rate, GaussianDpEvent(noise))
        oracle, tighter = RdpAccountant(ours.ORDERS), PLDAccountant()
        oracle.compose(event, steps)
        tighter.compose(event, steps)
        epsilon = ours.epsilon(noise, rate, steps, delta)
        assert epsilon > tighter.get_epsilon(delta), (noise, rate, steps, delta)
        again = ours.noise_multiplier_for(epsilon, rate, steps, delta)
        worst = max(worst, abs(epsilon / oracle.get_epsilon(delta) - 1))
        inverse = max(inverse, abs(again / noise - 1))
    print(f"50 settings: largest difference {worst:.2%}; of the noise {inverse:.2%}")


EPSILONS = (0, 8, 3, 1)  # 0: without differential privacy
HOSPITALS, ROUNDS = 3, 20
SIZES = (100, 1000, 5000)  # training samples of each hospital
METHODS = ("local", "fedavg", "fedper", "apple", "ditto", "gh-ofl")
ONE_MESSAGE = {"rounds": 1, "evaluate-every": 1, "gh-ofl.shrink": 0.3}


def private(epsilon: int) -> dict[str, object]:
    return {"dp": True, "dp.target-epsilon": epsilon} if epsilon else {}


def attacks() -> None:
    """Print the results of the inversion attacks on silos of 1, 8 and 64 patients, with one batch of all."""
    from benchmarks.common import print_table
    from benchmarks.privacy import Case, invert, subject

    def rows() -> Iterator[list[object]]:
        networks = (
            ("breast-cancer", "mlp", 3),
            ("digits", "mlp", 3),
            ("digits", "small-cnn", 2),
        )
        for name, model, cases in networks:
            for size, epsilon in itertools.product((1, 8, 64)[:cases], EPSILONS):
                case = Case(size, size, 1)
                results = invert(subject(name), model, "fedavg", case, private(epsilon))
                best = max(results, key=lambda result: (result.hits, -float(result.errors[0])))
                yield [f"{name}, {model}", size, epsilon, best.hits, *best.errors]

    header = "data, network | patients | epsilon | found | error | average patient"
    print_table(f"{header} | nearest other patient", rows())


def counts() -> None:
    """Print the results of the attack on class counts, by rounds; epsilon is for all 20 rounds."""
    from benchmarks.common import print_table
    from benchmarks.privacy import LABELS_HEADER, labels_of

    cases = itertools.product(("mlp", "small-cnn"), EPSILONS)
    rows = (
        [f"digits, {model}", epsilon, *labels_of("digits", model, 1, private(epsilon))]
        for model, epsilon in cases
    )
    print_table(f"data, network | epsilon | {LABELS_HEADER}", rows)


def accuracy(datasets: Sequence[str] = ("mnist", "fashion-mnist")) -> None:
    """Print the mean test accuracy of three hospitals after 20 rounds (`gh-ofl`: one), by size and epsilon."""
    from benchmarks.common import print_table

    def rows() -> Iterator[list[object]]:
        for dataset in map(own_names, datasets):
            for size, method in itertools.product(SIZES, METHODS):
                # Of `local` nothing leaves, whatever epsilon is
                tried = EPSILONS[:1] if method == "local" else EPSILONS
                cells = (final(dataset, size, method, epsilon) for epsilon in tried)
                yield [Path(dataset).stem, size, method, *cells]

    header = "data | patients per hospital | method | no noise"
    print_table(f"{header} | epsilon 8 | epsilon 3 | epsilon 1", rows())


def own_names(dataset: str) -> str:
    """Return a data set's name; for a file with MedMNIST's arrays and others, a copy with MedMNIST's alone."""
    if not dataset.endswith(".npz"):
        return dataset
    import numpy as np

    file = Path(tempfile.mkdtemp()) / Path(dataset).name
    with np.load(dataset) as arrays:
        images = {key: arrays[key] for key in arrays.files if key.endswith("_images")}
        labels = {key: arrays[key].ravel() for key in arrays.files if key.endswith("_labels")}
    np.savez(file, **images, **labels)
    return str(file)


def final(dataset: str, size: int, method: str, epsilon: int) -> str:
    """Return the score of one run in percent: 100 steps on a fifth of the patients each, a small network."""
    from benchmarks.common import final_scores, whole_run
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
        scores = final_scores(whole_run(values)).values()
    except (UserError, DataError):
        return "too few samples"
    return f"{100 * sum(scores) / len(scores):.1f}"


def step() -> None:
    """Print the costs of a private step, and its difference from Opacus's."""
    from benchmarks.common import print_table
    from benchmarks.dp_step import COLUMNS, costs

    if folder := os.environ.get("OPACUS", ""):
        sys.path.append(folder)
    print_table(COLUMNS, costs(bool(folder)))


def canaries() -> None:
    """Print the one-run audit."""
    from benchmarks.dp_audit import lines

    for line in lines():
        print(line, flush=True)


PARTS: dict[str, Callable[[], None]] = {
    part.__name__: part for part in (accountant, step, canaries, attacks, counts, accuracy)
}


def main(command: str, *names: str) -> None:
    """Execute the command. Raises SystemExit for an unknown one."""
    parts = names if command == "audit" else [command]
    if command == "accuracy" and names:
        accuracy(names)
    elif unknown := [part for part in parts if part not in PARTS]:
        raise SystemExit(f"{unknown[0]!r} is none of audit, {', '.join(PARTS)}")
    else:
        for part in parts or PARTS:
            print(f"## {part}\n")
            PARTS[part]()


if __name__ == "__main__":
    if find_spec("torch"):
        from models.training import use_threads

        use_threads(1)
        logging.disable(logging.WARNING)
    main(*sys.argv[1:])
