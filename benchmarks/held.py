"""Copies of a large network that a deployed federation's processes hold at their peak.

    python -m benchmarks.held [--strategies fedavg,fedbn,apple] [--network resnet50|bert] [--silos 3] [--rounds 2]

``silofl up`` with silos of a few tiny samples. After a run with a small network, whose peaks are the base, one run for
each strategy. Each process's anonymous memory is read all the time, beyond the base and in units of the network's
bytes; what SuperNode and app share (`memfd`) counts as the SuperNode's. ``bert``: BERT-base of `transformers`.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from torch import nn

from benchmarks.common import table
from benchmarks.round_trip import homes
from models.shapes import Shape
from partitions.npz import write_npz
from server.deploy import local, processes, submit
from server.deploy.federation import read_federation

EVERY_SECONDS = 0.02
SHORT = 3e9  # bytes that stay free: below, the federation is ended
NETWORKS = {"resnet50": "resnet50", "bert": "benchmarks.held:bert"}
WORDS = 30522  # of BERT's vocabulary
APP = "site.runtime.template"
ROLES = {
    "server.deploy.superlink": "SuperLink",
    "flwr-serverapp": "ServerApp",
    "site.runtime.supernode": "SuperNode",
    APP: "app",
}


class Bert(nn.Module):
    """BERT-base with an output for each class. ``sizes``: of another one, by the names of `BertConfig`."""

    def __init__(self, outputs: int, **sizes: Any) -> None:
        super().__init__()
        # BERT needs none, and one of another build than torch's ends the import
        sys.modules.setdefault("torchvision", None)  # type: ignore[arg-type]
        from transformers import BertConfig, BertForSequenceClassification

        config: Any = BertConfig(**sizes)
        config.num_labels = outputs
        whole = BertForSequenceClassification(config)
        self.bert, self.dropout, self.classifier = whole.bert, whole.dropout, whole.classifier

    def forward(self, x: Any) -> Any:
        pooled = self.bert(x, attention_mask=(x > 0).long()).pooler_output
        return self.classifier(self.dropout(pooled))


def bert(shape: Shape, outputs: int) -> nn.Module:
    return Bert(outputs)


def small_bert(shape: Shape, outputs: int) -> nn.Module:
    return Bert(
        outputs, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )


def held(pid: int, role: str) -> int:
    """Return the bytes of a process's anonymous memory, and of a SuperNode's `memfd`; 0 after its end."""
    total = 0
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                total = int(line.split()[1]) * 1024
        for entry in os.scandir(f"/proc/{pid}/fd") if role == "SuperNode" else ():
            if os.readlink(entry.path).startswith("/memfd:silofl"):
                total += os.stat(entry.path).st_blocks * 512
    except OSError:
        pass
    return total


def available() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(
        int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")
    )


class Watch:
    """Context that reads the memory of a federation's processes. ``peaks``: by role; ``all``: of all at one time."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.over = directory, threading.Event()
        self.peaks: dict[str, int] = defaultdict(int)
        self.thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Watch:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()

    def _watch(self) -> None:
        roles, looked = dict[int, str](), 0.0
        # The template process, and the apps of earlier runs, which stay for a while
        before = {
            process.pid for process in processes.find(self.directory) if APP in process.command
        }
        while not self.over.wait(EVERY_SECONDS):
            if time.monotonic() - looked > 0.5:
                looked = time.monotonic()
                roles = {
                    process.pid: role
                    for process in processes.find(self.directory)
                    for text, role in ROLES.items()
                    if text in process.command and process.pid not in before
                }
                if available() < SHORT:
                    print("memory is short: the federation is ended", flush=True)
                    processes.end(processes.find(self.directory), grace=0)
            now = {pid: held(pid, role) for pid, role in roles.items()}
            sums = {"a silo": 0}
            for pid, size in now.items():
                self.peaks[roles[pid]] = max(self.peaks[roles[pid]], size)
                sums["a silo"] += size if roles[pid] in ("SuperNode", "app") else 0
            self.peaks["all silos"] = max(self.peaks["all silos"], sums["a silo"])


def write_data(file: Path, network: str) -> None:
    rng = np.random.default_rng(1)
    x = rng.integers(0, 255, (20, 32, 32, 3), np.uint8)
    of_texts = {}
    if network == "bert":
        x = rng.integers(1, WORDS, (20, 16), np.int32)
        of_texts = {"vocabulary": np.array(WORDS)}
    write_npz(file, {"x": x, "y": np.arange(20) % 2, **of_texts})


def run(directory: Path, values: Mapping[str, Any]) -> tuple[dict[str, int], Path]:
    """Return the peaks of a run, by role, and its run directory; raise SystemExit if its history is not finite."""
    with Watch(directory) as watch:
        out = submit.run(dict(values))
    with (out / "history.csv").open() as file:
        rows = list(csv.DictReader(file))
    scores = [float(row["value"]) for row in rows if row["metric"].endswith("loss")]
    if not scores or not all(map(math.isfinite, scores)):
        raise SystemExit(f"{out}: not finite")
    print(f"{values['strategy']} {values['model']}: {len(scores)} finite losses", flush=True)
    return watch.peaks, out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--strategies", default="fedavg,fedbn,apple")
    parser.add_argument("--network", choices=NETWORKS, default="resnet50")
    parser.add_argument("--silos", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    with homes() as folder:
        names = [f"hospital-{i + 1:02d}" for i in range(args.silos)]
        for name in names:
            write_data(folder / f"{name}.npz", args.network)
        lines = [f"  - {{name: {name}, data: {name}.npz, policy: public}}" for name in names]
        (folder / "federation.yaml").write_text("\n".join(["name: held", "silos:", *lines, ""]))
        os.environ["OMP_NUM_THREADS"] = "1"
        up = local.up(read_federation(folder / "federation.yaml"), echo=lambda line: None)
        try:
            measure(args, folder, up.directory)
        finally:
            processes.end(processes.find(up.directory), grace=5.0)


def largest(file: Path) -> int:
    """Return the bytes of the largest array in a state: a model, of which APPLE's server has one for each silo."""
    with safe_open(file, framework="np") as content:
        return max(int(content.get_tensor(name).nbytes) for name in content.keys())  # noqa: SIM118


def measure(args: argparse.Namespace, folder: Path, directory: Path) -> None:
    rounds = {"rounds": args.rounds, "batch-size": 16, "local-epochs": 1, "learning-rate": 1e-3}
    # Of the same library: what its import takes is no copy of the model
    small = "benchmarks.held:small_bert" if args.network == "bert" else "resnet8"
    rows = []
    for strategy in args.strategies.split(","):
        of = {**rounds, "strategy": strategy}
        base, _ = run(directory, {**of, "model": small, "out": str(folder / f"{strategy}-s")})
        large = {**of, "model": NETWORKS[args.network], "out": str(folder / strategy)}
        peaks, out = run(directory, large)
        size = largest(next(out.rglob("*.safetensors")))
        roles = ["SuperNode", "app", "SuperLink", "ServerApp"]
        parts = [peaks[role] - base[role] for role in roles]
        each = (peaks["all silos"] - base["all silos"]) / args.silos
        rows.append(
            [strategy, *(f"{part / size:.1f}" for part in (*parts, each)), f"{size / 1e6:.0f}"]
        )
        print(*rows[-1], flush=True)
    print(table(rows, ["strategy", *roles, "a silo, all at once", "model, MB"]))


if __name__ == "__main__":
    main()
