"""Demonstration (``make demo``): twelve silos and a server on this machine, three methods, one report, a few minutes.

It does the same as these commands: ``silofl partition`` splits the data set into one file per silo, and a federation
file lists the files. ``silofl up`` starts the processes (gRPC, TLS, node keys), and ``silofl run`` trains. At the end,
``silofl down`` stops the processes, also after Ctrl-C or a failure. The run is in ``runs/demo``, the silos' files are
in ``runs/demo-silos``.
"""

from __future__ import annotations

import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from client.faults import explain
from partitions.common.errors import UserError
from partitions.datasets.registry import load_dataset
from partitions.manifest import write_partition
from partitions.schemes.fedala import Dirichlet
from server.deploy import local, submit
from server.deploy.federation import read_federation
from server.report.study import Study
from server.report.write import silo_table, write_report

NAME = "silofl-demo"
SILOS = 12
SEED = 1
PARTITION = Dirichlet(beta=0.5, min_test=20)
SETTINGS: dict[str, object] = {
    "strategy": "local,fedavg,apple",
    "seed": SEED,
    "rounds": 15,
    "threads": 1,  # per silo; twelve of them share the machine
    "model": "mlp",
    "local-epochs": 5,
    "batch-size": 16,
    "learning-rate": 0.1,
    "apple.dr-learning-rate": 0.01,
    "apple.common-init": True,
    "min-metric-samples": 1,  # public data: nothing has to be withheld
}

START = time.monotonic()


def say(line: str) -> None:
    """Print a line of progress, with the time since the start."""
    seconds = int(time.monotonic() - START)
    print(f"[{seconds // 60}:{seconds % 60:02d}] {line}", file=sys.stderr, flush=True)


def clear(out: Path) -> None:
    """Delete an earlier demo's run. Raises UserError if the directory holds anything else."""
    if out.exists():
        if any(out.iterdir()) and not (out / "config.toml").exists():
            raise UserError(f"{out} holds something else: move it away")
        shutil.rmtree(out)


def write_federation(folder: Path) -> Path:
    """Split the data into one file per silo, and write the federation file that lists them."""
    manifest = write_partition(
        load_dataset("digits"), "dirichlet", folder / "data", silos=SILOS, seed=SEED, settings=PARTITION
    )
    silos: list[dict[str, Any]] = [
        {"name": s["name"], "device": "cpu", "data": f"data/{s['file']}", "policy": "public"} for s in manifest["silos"]
    ]
    file = folder / "federation.yaml"
    file.write_text(yaml.safe_dump({"name": NAME, "silos": silos}, sort_keys=False), encoding="utf-8")
    return file


def demo(root: Path) -> Path:
    """Run the demonstration in ``root``, stop all its processes, and return the report."""
    out, folder = root / "demo", root / "demo-silos"
    clear(out)
    local.clear(NAME)  # processes of a demonstration that was killed
    say(f"splitting digits over {SILOS} silos (dirichlet {PARTITION.beta}, seed {SEED}) in {folder}")
    federation = read_federation(write_federation(folder))
    try:
        say("starting a server and the silos")
        local.up(federation, echo=say)
        say(f"training {SETTINGS['strategy']}, {SETTINGS['rounds']} rounds each")
        submit.run({**SETTINGS, "out": str(out)}, NAME)
    finally:
        say("stopping everything")
        local.clear(NAME)
    shutil.copy(folder / "data" / "manifest.json", out / "manifest.json")  # these data are public
    report = write_report(out)
    print(f"\n{silo_table(Study(out))}\n", file=sys.stderr)
    say("done")
    return report


def interrupted(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def main() -> int:
    """Return the exit code. 0: the report is written; 1: failed; 130: interrupted."""
    signal.signal(signal.SIGTERM, interrupted)
    try:
        print(demo(Path("runs")))
        return 0
    except Exception as error:
        print(f"demo: {explain(error)[1]}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
