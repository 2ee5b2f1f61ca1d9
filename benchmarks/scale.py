"""Time and memory as silos, parameters and rounds grow; each case in a fresh process on random data of a fixed size.

    python -m benchmarks.scale [silos] [parameters] [rounds] [resnet18]

silos: FedAvg and APPLE (five core models a round, ``apple.max-downloads = 5``) with 3 to 100 silos of 64 grey
pictures each. parameters: FedAvg with 12 silos and networks of 60 k to 11 M. rounds: memory over 10, 50, 200 rounds.
resnet18: APPLE with 12 silos of 32 colour pictures each and 11 M parameters.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import Prepared, random_pictures, seconds, table

MIB = 2**20


def one(
    values: dict[str, Any], shape: list[int], samples: int, marks: list[int]
) -> dict[str, Any]:
    """Return resident memory in MiB before and after these rounds, its peak, and the seconds of the last round."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "random.npz")
        random_pictures(file, shape, values["silos"], samples)
        before = resident()
        prepared = Prepared({**values, "dataset": str(file), "partition": "iid", "threads": 0})
        memory, last = [], 0.0
        for number in range(1, max(marks) + 1):
            last = seconds(prepared.round)
            if number in marks:
                memory.append(resident())
    return {
        "before": before,
        "memory": memory,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "seconds": last,
        "parameters": prepared.strategy.layout.size,
    }


def resident() -> float:
    return (
        int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MIB
    )


def measure(
    values: dict[str, Any], shape: list[int], samples: int, marks: list[int]
) -> dict[str, Any]:
    """Run :func:`one` in a separate process."""
    case = json.dumps([values, shape, samples, marks])
    command = [sys.executable, "-m", "benchmarks.scale", "--case", case]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


def silos() -> str:
    rows = []
    for strategy in ("fedavg", "apple"):
        for count in (3, 12, 40, 100):
            values = {
                "strategy": strategy,
                "model": "fedala-cnn",
                "silos": count,
                "apple.max-downloads": 5,
            }
            m = measure(values, [28, 28, 1], 64, [3])
            states = (m["memory"][0] - m["before"]) / (count * 4 * m["parameters"] / MIB)
            per_silo = 1000 * m["seconds"] / count
            rows.append(
                [strategy, str(count), f"{per_silo:.0f}", f"{m['peak']:.0f}", f"{states:.1f}"]
            )
    return table(
        rows, ["method", "silos", "ms per silo and round", "peak, MiB", "held per silo, models"]
    )


def parameters() -> str:
    rows = []
    for name, options in (("mlp", {"mlp.hidden": "76"}), ("fedala-cnn", {}), ("resnet18", {})):
        m = measure(
            {"strategy": "fedavg", "model": name, "silos": 12, **options}, [28, 28, 1], 32, [2]
        )
        states = (m["memory"][0] - m["before"]) / (12 * 4 * m["parameters"] / MIB)
        rows.append(
            [
                name,
                f"{m['parameters']:,}",
                f"{m['seconds']:.2f}",
                f"{m['peak']:.0f}",
                f"{states:.1f}",
            ]
        )
    return table(
        rows, ["model", "parameters", "seconds per round", "peak, MiB", "held per silo, models"]
    )


def rounds() -> str:
    rows = []
    for strategy in ("fedavg", "apple", "fedfomo", "fedala"):
        m = measure(
            {"strategy": strategy, "model": "auto", "silos": 12}, [8, 8, 1], 64, [10, 50, 200]
        )
        rows.append(
            [strategy, *(f"{value - m['memory'][0]:+.1f}" for value in m["memory"][1:])]
        )
    return table(
        rows, ["method", "MiB, round 50 over round 10", "MiB, round 200 over round 10"]
    )


def resnet18() -> str:
    values = {"strategy": "apple", "model": "resnet18", "silos": 12, "batch-size": 16}
    m = measure(values, [32, 32, 3], 32, [1, 2, 3])
    model = 4 * m["parameters"] / MIB
    rows = [
        [str(i + 1), f"{v:.0f}", f"{(v - m['before']) / model:.1f}"]
        for i, v in enumerate(m["memory"])
    ]
    rows.append(["peak", f"{m['peak']:.0f}", f"{(m['peak'] - m['before']) / model:.1f}"])
    text = f"one model: {model:.1f} MiB ({m['parameters']:,} parameters)\n\n"
    return text + table(rows, ["after round", "MiB", "of it models"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = {"silos": silos, "parameters": parameters, "rounds": rounds, "resnet18": resnet18}
    parser.add_argument("what", nargs="*", default=list(known), help=", ".join(known))
    parser.add_argument("--case", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case:
        print(json.dumps(one(*json.loads(given.case))))
        return
    for name in given.what:
        print(f"## {name}\n\n{known[name]()}\n")


if __name__ == "__main__":
    main()
