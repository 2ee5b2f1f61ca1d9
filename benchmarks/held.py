"""Copies of a large network that a deployed federation's processes hold at their peak.

    python -m benchmarks.held [--strategies fedavg,fedbn,apple] [--network resnet50|bert] [--silos 3] [--rounds 2]

``silofl up`` with silos of a few tiny samples. After a run with a small network, whose peaks are the base, one run for
each strategy. Each process's anonymous memory is read all the time, beyond the base and in units of the network's
bytes; what SuperNode and app share (`memfd`) counts as the SuperNode's. ``bert``: BERT-base of `transformers`.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from torch import nn

from benchmarks.common import command_line, print_table
from benchmarks.round_trip import federated, homes
from models.shapes import Shape
from partitions.common.memory import available
from partitions.npz import write_npz
from server.deploy import processes, submit
from server.results.history import History

EVERY_SECONDS = 0.02
SHORT = 3e9  # bytes that stay free: below, the federation is ended
NETWORKS = {"resnet50": "resnet50", "bert": "benchmarks.held:bert"}
WORDS = 30522  # of BERT's vocabulary
APP = "site.runtime.template"
ROLES = {
    "site.runtime.supernode": "SuperNode",
    APP: "app",
    "server.deploy.superlink": "SuperLink",
    "flwr-serverapp": "ServerApp",
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


def watch(directory: Path, peaks: dict[str, int], over: threading.Event) -> None:
    """Note the most memory of a federation's processes until ``over``: by role, and of all silos at one time."""
    roles, looked = dict[int, str](), 0.0
    # The template process, and the apps of earlier runs, which stay for a while
    before = {p.pid for p in processes.find(directory) if APP in p.command}
    while not over.wait(EVERY_SECONDS):
        if time.monotonic() - looked > 0.5:
            looked = time.monotonic()
            roles = {
                p.pid: role
                for p in processes.find(directory)
                for text, role in ROLES.items()
                if text in p.command and p.pid not in before
            }
            if available() < SHORT:
                print("memory is short: the federation is ended", file=sys.stderr)
                processes.end(processes.find(directory), grace=0)
        now = {pid: held(pid, role) for pid, role in roles.items()}
        for pid, size in now.items():
            peaks[roles[pid]] = max(peaks[roles[pid]], size)
        of_silos = [size for pid, size in now.items() if roles[pid] in ("SuperNode", "app")]
        peaks["all silos"] = max(peaks["all silos"], sum(of_silos))


def write_data(file: Path, network: str) -> None:
    rng = np.random.default_rng(1)
    arrays = {"x": rng.integers(0, 255, (20, 32, 32, 3), np.uint8), "y": np.arange(20) % 2}
    if network == "bert":
        arrays["x"] = rng.integers(1, WORDS, (20, 16), np.int32)
        arrays["vocabulary"] = np.array(WORDS)
    write_npz(file, arrays)


def run(directory: Path, values: Mapping[str, Any]) -> tuple[dict[str, int], Path]:
    """Return the peaks of a run, by role, and its run directory; raise SystemExit if its history is not finite."""
    peaks, over = defaultdict[str, int](int), threading.Event()
    thread = threading.Thread(target=watch, args=(directory, peaks, over))
    thread.start()
    try:
        out = submit.run(dict(values))
    finally:
        over.set()
        thread.join()
    rows = History(out / "history.csv").rows
    scores = [row.value for row in rows if row.metric.endswith("loss")]
    if not scores or not all(map(math.isfinite, scores)):
        raise SystemExit(f"{out}: not finite")
    return peaks, out


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--strategies", default="fedavg,fedbn,apple")
    parser.add_argument("--network", choices=NETWORKS, default="resnet50")
    parser.add_argument("--silos", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with homes() as folder:
        names = [f"hospital-{i + 1:02d}" for i in range(args.silos)]
        for name in names:
            write_data(folder / f"{name}.npz", args.network)
        lines = [f"  - {{name: {name}, data: {name}.npz, policy: public}}" for name in names]
        with federated(folder, "silos:", *lines) as (_, directory):
            header = ["strategy", *ROLES.values(), "a silo, all at once", "model, MB"]
            print_table(" | ".join(header), measure(args, folder, directory))


def largest(file: Path) -> int:
    """Return the bytes of the largest array in a state: a model, of which APPLE's server has one for each silo."""
    with safe_open(file, framework="np") as content:
        return max(int(content.get_tensor(name).nbytes) for name in content.keys())  # noqa: SIM118


def measure(args: argparse.Namespace, folder: Path, directory: Path) -> Iterator[list[object]]:
    """Yield a row for each strategy."""
    rounds = {"rounds": args.rounds, "batch-size": 16, "local-epochs": 1, "learning-rate": 1e-3}
    # Of the same library: what its import takes is no copy of the model
    small = "benchmarks.held:small_bert" if args.network == "bert" else "resnet8"
    for strategy in args.strategies.split(","):
        of = {**rounds, "strategy": strategy}
        base, _ = run(directory, {**of, "model": small, "out": str(folder / f"{strategy}-s")})
        large = {**of, "model": NETWORKS[args.network], "out": str(folder / strategy)}
        peaks, out = run(directory, large)
        size = largest(next(out.rglob("*.safetensors")))
        parts = [peaks[role] - base[role] for role in ROLES.values()]
        parts.append((peaks["all silos"] - base["all silos"]) // args.silos)
        yield [strategy, *(f"{part / size:.1f}" for part in parts), f"{size / 1e6:.0f}"]


if __name__ == "__main__":
    main()
