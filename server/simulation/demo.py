"""Demonstration (``make demo``): twelve silos and a server on this machine, three methods, one report, a few minutes.

It does the steps of ``docs/consortium.md``: ``silofl up`` splits the data set and starts the processes (gRPC, TLS, node
keys), ``silofl run`` trains, and ``silofl down`` stops the processes, also after Ctrl-C or a failure. The run is in
``runs/demo``, the federation file and the silos' data are in ``runs/demo-silos``.
"""

from __future__ import annotations

import shutil
import signal
import sys
import time
from pathlib import Path

import yaml

from client.faults import explain
from partitions.common.errors import UserError
from server.deploy import local, submit
from server.deploy.federation import Federation, read_federation
from server.report.study import Study
from server.report.write import silo_table, write_report

NAME = "silofl-demo"
SILOS = 12
STRATEGIES, ROUNDS = "local,fedavg,fedala", 15
# As in federation.yaml. Half of a hospital's training part is for validation: it trains on 36 to 76 samples.
DATA: dict[str, object] = {
    "dataset": "digits",
    "partition": "dirichlet",
    "seed": 42,
    "settings": {"dirichlet.beta": 1.0, "dirichlet.min-test": 25, "validation": 0.5},
}
RUN: dict[str, object] = {
    "model": "mlp",
    "threads": 1,  # per silo; twelve of them share the machine
    "local-epochs": 5,
    "batch-size": 16,
    "learning-rate": 0.1,
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


def write_federation(folder: Path) -> Federation:
    """Write the federation file of the demonstration, and return its content."""
    silos = [{"name": f"hospital-{i:02d}", "device": "cpu", "data": "demo"} for i in range(1, SILOS + 1)]
    file = folder / "federation.yaml"
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump({"name": NAME, "demo": DATA, "run": RUN, "silos": silos}, sort_keys=False), "utf-8")
    return read_federation(file)


def demo(root: Path) -> Path:
    """Run the demonstration in ``root``, stop all its processes, and return the report."""
    out, folder = root / "demo", root / "demo-silos"
    clear(out)
    local.clear(NAME)  # processes of a demonstration that was killed
    federation = write_federation(folder)
    try:
        say("starting a server and the silos")
        silos = local.up(federation, echo=say)
        say(f"training {STRATEGIES}, {ROUNDS} rounds each")
        submit.run({"strategy": STRATEGIES, "rounds": ROUNDS, "out": str(out)}, NAME)
        shutil.rmtree(folder / "data", ignore_errors=True)
        shutil.copytree(silos.directory / "data", folder / "data")  # these data are public
        shutil.copy(folder / "data" / "manifest.json", out / "manifest.json")
    finally:
        say("stopping everything")
        local.clear(NAME)
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
