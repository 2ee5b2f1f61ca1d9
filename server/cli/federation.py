"""Commands of a federation: ``up``, ``status``, ``run``, ``stop``, ``down``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from server.cli.research import add_run_options, print_outcomes, run_values


def add_commands(commands: Any) -> None:
    """Add the commands of this group to the parser."""
    add_up(commands)
    add_status(commands)
    add_run(commands)
    add_stop(commands)
    add_down(commands)


def add_up(commands: Any) -> None:
    """Add the command ``up``."""
    p = commands.add_parser(
        "up",
        help="start a federation of processes on this machine",
        description="Start a server and one process per silo on this machine, talking gRPC with TLS and node keys, "
        "and write the flwr connection named after the federation. Returns when every silo is online. "
        "Run again it mends what has died and applies what has changed in the file. "
        "With SILOFL_ALLOWED_APPS set (a file of SHA-256 sums, or sums joined by commas) "
        "the silos refuse every other app.",
    )
    p.add_argument(
        "file",
        metavar="FEDERATION.yaml",
        nargs="?",
        default="federation.yaml",
        type=Path,
        help="which silos, devices and data (default: federation.yaml)",
    )
    p.set_defaults(run=up)


def add_status(commands: Any) -> None:
    """Add the command ``status``."""
    p = commands.add_parser("status", help="which silos are online, which runs there are")
    p.add_argument("--json", action="store_true", help="as JSON")
    add_name(p)
    p.set_defaults(run=status)


def add_run(commands: Any) -> None:
    """Add the command ``run``."""
    p = commands.add_parser(
        "run",
        help="run methods on a federation",
        description="Submit as `flwr run` does, follow the rounds, and say why where it fails. Ctrl-C stops the run. "
        "The last line printed is the run directory.",
    )
    add_run_options(p)
    p.add_argument(
        "--connection", metavar="NAME", default="", help="flwr connection (default: of the federation that is up)"
    )
    p.set_defaults(run=run)


def add_stop(commands: Any) -> None:
    """Add the command ``stop``."""
    p = commands.add_parser("stop", help="end the runs that are under way")
    p.add_argument(
        "--connection", metavar="NAME", default="", help="flwr connection (default: of the federation that is up)"
    )
    p.set_defaults(run=stop)


def add_down(commands: Any) -> None:
    """Add the command ``down``."""
    p = commands.add_parser(
        "down",
        help="end a federation of processes",
        description="End every process of the federation. Keys, silo state, data and logs stay.",
    )
    add_name(p)
    p.set_defaults(run=down)


def add_name(p: argparse.ArgumentParser) -> None:
    p.add_argument("--name", metavar="NAME", default="", help="which federation, where several are up")


def up(args: argparse.Namespace) -> None:
    from server.deploy import local
    from server.deploy.federation import read_federation

    federation = local.up(read_federation(args.file), echo=lambda line: print(line, file=sys.stderr))
    print(f"{federation.name} is up: {len(federation.silos)} silos, connection {federation.connection.name}")


def status(args: argparse.Namespace) -> None:
    from server.deploy import local

    found = local.status(local.find_local(args.name))
    if args.json:
        print(json.dumps(found, indent=1))
        return
    server = "running" if found["superlink"]["running"] else "stopped"
    if server == "running" and not found["superlink"]["executor"]:
        server = "runs, but starts no run (`silofl up` mends it)"
    print(f"{found['name']}: server {server}, silos reach it at {found['fleet']}, connection {found['connection']}")
    width = max(len(silo["name"]) for silo in (*found["silos"], *found["elsewhere"]))
    for silo in found["silos"]:
        print(f"  {silo['name']:{width}}  {silo['state']:11}  {silo['device']:7}  {silo['data']}")
    for silo in found["elsewhere"]:
        print(f"  {silo['name']:{width}}  {silo['state']:11}  joins with a bundle")
    for one in found["runs"][:5]:
        print(f"  run {one['run_id']}: {one['status']} {one['details']}".rstrip())


def run(args: argparse.Namespace) -> None:
    from server.deploy import submit
    from server.report.study import Study
    from server.report.write import silo_table

    out = submit.run(run_values(args), args.connection)
    if (out / "summary.json").is_file():  # missing here if the server is on another machine
        print(silo_table(Study(out)), file=sys.stderr)
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
