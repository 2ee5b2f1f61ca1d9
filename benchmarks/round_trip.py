"""A round without training over gRPC: silofl's against that of a plain Flower app with a `NumPyClient`.

    python -m benchmarks.round_trip [--silos 12] [--rounds 8] [--plain-rounds 3] [--repeats 2] [--network resnet50]
    python -m benchmarks.round_trip masked [--repeats 2]

Both have 12 silos on this machine, 580 k parameters that go down and come back, and no evaluation. Ours is
`silofl up` and `silofl run --strategy fedavg --set local-epochs=0 evaluate-every=0`, with TLS, node keys, and states
kept on disk; theirs is Flower's own SuperLink and SuperNodes with Flower's settings, FedAvg, and a client that gives
back what it got. In turns; the first round of each run, which fetches the app, is not counted. ``masked`` compares runs
with and without `secure-aggregation`, in turns in one federation.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.common import command_line, print_table, ratios
from client.protocol.launch import FLOWER, free_ports
from client.site.study import approvals
from server.deploy import local, processes, submit
from server.deploy.federation import Federation, read_federation
from server.deploy.study_draft import app_sums, draft, known_peers
from server.results.history import History

# On grey pictures of ten classes (fedala-cnn: of 28 x 28 pixels)
PARAMETERS = {"fedala-cnn": 582_026, "resnet50": 23_522_250}
TIMEOUT_SECONDS = 900.0

PLAIN_PROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "plain"
version = "1.0.0"
dependencies = []
[tool.flwr.app]
publisher = "plain"
[tool.flwr.app.components]
serverapp = "plain:server"
clientapp = "plain:client"
[tool.flwr.app.config]
rounds = 3
silos = 12
parameters = 1
times = ""
"""
PLAIN_APP = '''\
"""FedAvg as in Flower's first tutorial; the client gives back what it got."""
import time
import numpy as np
import torch  # as every such client does
from flwr.client import ClientApp, NumPyClient
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg

class Client(NumPyClient):
    def fit(self, parameters, config):
        return parameters, 1, {}

client = ClientApp(lambda context: Client().to_client())

class Timed(FedAvg):
    def configure_fit(self, *args, **kwargs):
        self.started = time.perf_counter()
        return super().configure_fit(*args, **kwargs)

    def aggregate_fit(self, server_round, results, failures):
        assert len(results) == self.min_fit_clients and not failures
        aggregated = super().aggregate_fit(server_round, results, failures)
        with open(self.times, "a") as file:
            print(time.perf_counter() - self.started, file=file)
        return aggregated

def components(context):
    config = context.run_config
    silos = config["silos"]
    strategy = Timed(
        fraction_evaluate=0.0, min_fit_clients=silos, min_evaluate_clients=0, min_available_clients=silos,
        initial_parameters=ndarrays_to_parameters([np.zeros(config["parameters"], np.float32)]),
    )
    strategy.times = config["times"]
    return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=config["rounds"]))

server = ServerApp(server_fn=components)
'''


@contextmanager
def homes() -> Iterator[Path]:
    """Context with a temporary folder for all output, which contains this process's home folders."""
    with tempfile.TemporaryDirectory() as name:
        folders = {"XDG_STATE_HOME": f"{name}/state", "FLWR_HOME": f"{name}/flower"}
        with mock.patch.dict(os.environ, {**folders, **FLOWER}):
            yield Path(name)


@contextmanager
def federated(folder: Path, *lines: str) -> Iterator[tuple[Federation, Path]]:
    """Context with the federation that these lines of its file describe, and the directory of its processes."""
    file = folder / "federation.yaml"
    file.write_text("\n".join(["name: benchmark", *lines, ""]))
    federation = read_federation(file)
    directory = local.up(federation, echo=lambda line: None).directory
    try:
        yield federation, directory
    finally:
        processes.end(processes.find(directory), grace=5.0)


def demo(silos: int, dataset: str) -> list[str]:
    """Return the lines of a federation of demo silos."""
    lines = [f"  - {{name: hospital-{i + 1:02d}, data: demo}}" for i in range(silos)]
    return [f"demo: {{dataset: {dataset}, partition: iid, seed: 42}}", "silos:", *lines]


def later_rounds(values: Mapping[str, Any]) -> list[float]:
    """Return the seconds of the rounds after the first of a run in the federation that is up."""
    rows = History(submit.run(dict(values)) / "history.csv").rows
    return [row.value for row in rows if row.metric == "round_seconds"][1:]


def empty(rounds: int, network: str) -> dict[str, Any]:
    """Return the settings of rounds in which as little as possible is done."""
    return {
        "strategy": "fedavg",
        "model": network,
        "rounds": rounds,
        "local-epochs": 0,
        "evaluate-every": 0,
    }


def ours(args: argparse.Namespace) -> list[float]:
    """Return the seconds of silofl's rounds after the first."""
    with homes() as folder, federated(folder, *demo(args.silos, args.dataset)):
        return later_rounds({**empty(args.rounds, args.network), "out": str(folder / "out")})


def compare(ways: Mapping[str, Callable[[int], list[float]]], repeats: int) -> None:
    """Run each way, in turns; print the median seconds of its later rounds, and their ratios to the first way's."""
    medians: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(repeats):
        for way, run in ways.items():
            medians[way].append(statistics.median(run(turn)))
            print(f"turn {turn + 1}, {way}: {medians[way][-1]:.2f}", flush=True)
    over = ratios(medians, next(iter(medians)))
    rows = ([way, *seconds, f"{over[way]:.3f}"] for way, seconds in medians.items())
    turns = [f"turn {n + 1}" for n in range(repeats)]
    print_table(" | ".join(["s per round", *turns, "ratio"]), rows)


def compare_masked(args: argparse.Namespace) -> None:
    """Compare masked with unmasked runs in one federation."""
    demo_lines = demo(args.silos, args.dataset)
    with homes() as folder, federated(folder, *demo_lines) as (federation, directory):
        bare, peers = empty(args.rounds, args.network), known_peers(federation)
        masked = {**bare, "secure-aggregation": True}
        texts = dict.fromkeys(("purpose", "contact", "results", "retention"), "a benchmark")
        study = draft(
            "masked",
            {**masked, "seed": ",".join(map(str, range(args.repeats)))},
            texts=texts,
            end=None,
            apps=app_sums(Path(__file__).parents[1]),
            peers=peers,
        )
        for silo in peers:
            approvals.record_approval(directory / "silos" / silo, silo, study, "a", "", [])

        def run(settings: Mapping[str, Any]) -> Callable[[int], list[float]]:
            return lambda turn: later_rounds(
                {**settings, "seed": turn, "out": str(folder / f"{len(settings)}-{turn}")}
            )

        compare(
            {"unmasked": run(bare), "masked": run({**masked, "study": "masked"})}, args.repeats
        )


def plain(silos: int, rounds: int, network: str) -> list[float]:
    """Return the seconds of the plain app's rounds after the first, under Flower's own commands."""
    with homes() as folder, ExitStack() as stack:
        stack.callback(lambda: processes.end(processes.find(folder), grace=5.0))
        link, *ports = free_ports(silos + 1)  # Fleet and Control API share a port
        # Not `environment()`: the SuperExec's poll interval is part of the comparison.
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        inherited = {**os.environ, "PATH": path}

        def start(part: str, command: str) -> None:
            processes.start_process(
                part,
                command.split(),
                directory=folder,
                log=folder / f"{part}.log",
                environment=inherited,
            )

        start(
            "superlink",
            f"flower-superlink --insecure --port {link} --disable-runtime-dependency-installation",
        )
        for port in ports:
            start(
                f"supernode-{port}",
                f"flower-supernode --insecure --superlink 127.0.0.1:{link} --port {port}",
            )
        app, times = folder / "app", folder / "times"
        app.mkdir()
        (app / "pyproject.toml").write_text(PLAIN_PROJECT)
        (app / "plain.py").write_text(PLAIN_APP)
        flower = Path(inherited["FLWR_HOME"])
        flower.mkdir(exist_ok=True)
        connection = f'[superlink.plain]\naddress = "127.0.0.1:{link}"\ninsecure = true\n'
        (flower / "config.toml").write_text(connection)
        config = (
            f'rounds={rounds} silos={silos} parameters={PARAMETERS[network]} times="{times}"'
        )
        time.sleep(20)  # until all are online
        command = ["flwr", "run", str(app), "plain", "--stream", "--run-config", config]
        subprocess.run(
            command, env=inherited, check=True, capture_output=True, timeout=TIMEOUT_SECONDS
        )
        return [float(line) for line in times.read_text().splitlines()][1:]


def compare_plain(args: argparse.Namespace) -> None:
    """Compare ours with a plain Flower app."""
    compare(
        {
            "plain Flower": lambda _: plain(args.silos, args.plain_rounds, args.network),
            "silofl": lambda _: ours(args),
        },
        args.repeats,
    )


COMPARISONS = {"plain": compare_plain, "masked": compare_masked}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("what", nargs="?", choices=COMPARISONS, default="plain")
    parser.add_argument("--silos", type=int, default=12)
    parser.add_argument("--dataset", default="mnist")
    parser.add_argument("--network", choices=PARAMETERS, default="fedala-cnn")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--plain-rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    COMPARISONS[args.what](args)


if __name__ == "__main__":
    main()
