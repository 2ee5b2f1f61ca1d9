"""Commands of a federation: ``up``, ``status``, ``run``, ``stop``, ``down``."""

from __future__ import annotations

import argparse
import json
import sys

from client.commands.table import Command, flag, option
from server.cli.options import FILE, RUN_OPTIONS, run_values
from server.cli.research import print_outcomes


def up(args: argparse.Namespace) -> None:
    from server.deploy import local
    from server.deploy.federation import read_federation

    federation = local.up(
        read_federation(args.file), echo=lambda line: print(line, file=sys.stderr)
    )
    print(
        f"{federation.name} is up: {len(federation.silos)} silos, connection {federation.connection.name}"
    )


def status(args: argparse.Namespace) -> None:
    from server.deploy import local

    found = local.status(local.find_local(args.name))
    if args.json:
        print(json.dumps(found, indent=1))
        return
    server = "running" if found["superlink"]["running"] else "stopped"
    if server == "running" and not found["superlink"]["executor"]:
        server = "runs, but starts no run (`silofl up` mends it)"
    print(
        f"{found['name']}: server {server}, silos reach it at {found['fleet']}, connection {found['connection']}"
    )
    width = max((len(s["name"]) for s in (*found["silos"], *found["elsewhere"])), default=0)
    for silo in found["silos"]:
        print(
            f"  {silo['name']:{width}}  {silo['state']:11}  {silo['device']:7}  {silo['data']}"
        )
    for silo in found["elsewhere"]:
        print(f"  {silo['name']:{width}}  {silo['state']:11}  joins with a bundle")
    for one in found["runs"][:5]:
        print(f"  run {one['run_id']}: {one['status']} {one['details']}".rstrip())


def run(args: argparse.Namespace) -> None:
    from server.deploy import submit
    from server.report.study import StudyResults
    from server.report.write import silo_table

    out = submit.run(run_values(args), args.connection)
    if (out / "summary.json").is_file():  # missing here if the server is on another machine
        print(silo_table(StudyResults(out)), file=sys.stderr)
        print_outcomes(out)
    print(out)


def stop(args: argparse.Namespace) -> None:
    from server.deploy import submit

    stopped = submit.stop(args.connection)
    print("\n".join(f"run {run_id} is stopped" for run_id in stopped) or "no run is under way")


def down(args: argparse.Namespace) -> None:
    from server.deploy import local

    name = args.name or local.leftover()
    if not name:
        print("no federation is up")
        return
    print(f"{name} is down ({local.down(name)} processes ended)")


UP_CONNECTION = option(
    "--connection",
    "NAME",
    "flwr connection (default: of the federation that is up)",
    default="",
)
WHICH = (option("--name", "NAME", "which federation, where several are up", default=""),)

COMMANDS = (
    Command(
        "up",
        "start a federation of processes on this machine",
        up,
        (FILE,),
        examples=("silofl up federation.yaml",),
        description="Start a server and one process per silo on this machine, talking gRPC with TLS and node "
        "keys, and write the flwr connection named after the federation. Returns when every silo "
        "is online. Run again it mends what has died and applies what has changed in the file. "
        "With SILOFL_ALLOWED_APPS set (a file of SHA-256 sums, or sums joined by commas) the silos"
        " refuse every other app.",
    ),
    Command(
        "status",
        "which silos are online, which runs there are",
        status,
        (flag("--json", "as JSON"), *WHICH),
        examples=("silofl status", "silofl status --json"),
    ),
    Command(
        "run",
        "run methods on a federation",
        run,
        (*RUN_OPTIONS, UP_CONNECTION),
        examples=(
            "silofl run --strategy local,fedavg,fedala --rounds 15",
            "silofl run --strategy apple --set study=NAME",
        ),
        description="Submit as `flwr run` does, follow the rounds, and say why where it fails. Ctrl-C stops "
        "the run. The last line printed is the run directory.",
    ),
    Command(
        "stop",
        "end the runs that are under way",
        stop,
        (UP_CONNECTION,),
        examples=("silofl stop",),
    ),
    Command(
        "down",
        "end a federation of processes",
        down,
        (*WHICH,),
        examples=("silofl down",),
        description="End every process of the federation. Keys, silo state, data and logs stay.",
    ),
)
