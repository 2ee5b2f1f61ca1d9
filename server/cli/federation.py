"""Commands of a federation: ``up``, ``status``, ``run``, ``stop``, ``down``."""

from __future__ import annotations

import argparse
import json
import sys

from client.commands.table import Command, OneOf, flag, option
from partitions.common.errors import UserError
from server.cli.options import (
    FILE,
    HOST,
    RUN_OPTIONS,
    STUDY,
    TOKEN_FILE,
    WHICH,
    connection_of,
    run_values,
    study_values,
)
from server.cli.research import print_outcomes


def up_command(args: argparse.Namespace) -> None:
    from server.deploy import local
    from server.deploy.federation import read_federation

    federation = local.up(
        read_federation(args.file),
        echo=lambda line: print(line, file=sys.stderr),
        resume=args.resume,
    )
    print(
        f"{federation.name} is up: {len(federation.silos)} silos, connection {federation.connection.name}"
    )


def status_command(args: argparse.Namespace) -> None:
    from server.deploy import local
    from server.deploy.room.listing import run_lines
    from server.rendering import fill

    state = local.status(local.find_local(connection_of(args.federation)))
    if args.json:
        state["runs"] = [run._asdict() for run in state["runs"]]
        print(json.dumps(state, indent=1))
        return
    lines = run_lines(state["runs"])
    print(fill("cli/status.txt", **state, lines=lines), end="")


def run_command(args: argparse.Namespace) -> None:
    from server.deploy import submit
    from server.report.study import StudyResults
    from server.report.write import silo_table
    from server.results.registration import keep_study

    text, named = study_values(args)
    out = submit.run(
        {**run_values(args), **named},
        connection_of(args.federation or args.connection),
        fill=lambda folder: keep_study(folder, text),
        name=args.name,
        now=args.now,
    )
    if (out / "summary.json").is_file():  # missing here if the server is on another machine
        print(silo_table(StudyResults(out)))
        print_outcomes(out)
    print(out)


def runs_command(args: argparse.Namespace) -> None:
    from server.deploy.control import Control, read_connection
    from server.deploy.local.record import find_federation
    from server.deploy.room.listing import named_runs, run_lines
    from server.deploy.submit import default_connection

    connection = connection_of(args.federation) or default_connection()
    with Control(read_connection(connection)) as control:
        up = find_federation(connection)
        runs = named_runs(control, up.on_host) if up else named_runs(control)
    if args.json:
        print(json.dumps([run._asdict() for run in runs], indent=1))
    else:
        print("\n".join(run_lines(runs)) or "there is no run")


def stop_command(args: argparse.Namespace) -> None:
    from server.deploy import submit

    name = submit.stop(connection_of(args.federation), args.name)
    print(f"run {name} is stopped" if name else "no run is under way")


def down_command(args: argparse.Namespace) -> None:
    from server.deploy import local

    name = connection_of(args.federation) or local.leftover()
    if not name:
        print("no federation is up")
        return
    print(f"{name} is down ({local.down(name)} processes ended)")


def watch_command(args: argparse.Namespace) -> None:
    from server.watch.access import token_for
    from server.watch.source import find_source

    if args.once and not args.text:
        raise UserError("--once: one picture is for a terminal; add --text")
    source = find_source(args.what)
    if args.text:
        from server.watch.source import show_run

        show_run(source, once=args.once)
        return
    from server.watch.serve import serve

    serve(source, args.host, args.port, token_for(args.host, args.token_file))


COMMANDS = (
    Command(
        "up",
        "start a federation of processes on this machine",
        up_command,
        (FILE, flag("--resume", "go on with the runs that were interrupted")),
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
        status_command,
        (flag("--json", "as JSON"), WHICH),
        examples=("silofl status", "silofl status --json"),
    ),
    Command(
        "run",
        "run methods on a federation",
        run_command,
        (
            *RUN_OPTIONS,
            option("--name", "NAME", "the run's name (default: method and date)", default=""),
            flag("--now", "begin beside the runs that are on, without waiting in the queue"),
            STUDY,
            OneOf((WHICH, option("--connection", "NAME", "as --federation NAME", default=""))),
        ),
        examples=(
            "silofl run --strategy local,fedavg,fedala --rounds 15",
            "silofl run --strategy apple --study study.toml",
        ),
        description="Submit as `flwr run` does, follow the rounds, and say why where it fails. Ctrl-C stops "
        "the run. The last line printed is the run directory.",
    ),
    Command(
        "runs",
        "list runs: name, state, round, method, owner, folder",
        runs_command,
        (flag("--json", "as JSON"), WHICH),
        examples=("silofl runs", "silofl runs --json"),
    ),
    Command(
        "stop",
        "end a run that is under way, or waits",
        stop_command,
        (
            option("name", "RUN", "its name (default: the only run)", nargs="?", default=""),
            WHICH,
        ),
        examples=("silofl stop fedavg-2026-11-29",),
    ),
    Command(
        "down",
        "end a federation of processes",
        down_command,
        (WHICH,),
        examples=("silofl down",),
        description="End every process of the federation. Keys, silo state, data and logs stay.",
    ),
    Command(
        "watch",
        "show a run as it goes on: a page, a terminal, numbers for Prometheus",
        watch_command,
        (
            option(
                "what",
                "RUN|FEDERATION",
                "a run directory, a folder whose newest run is shown, a federation, or a silo's bundle or"
                " state (default: the newest run in runs/, or the silo of this container or machine)",
                nargs="?",
                default="",
            ),
            option("--port", "P", "port, 0: one that is free", type=int, default=8642),
            HOST,
            TOKEN_FILE,
            flag("--text", "in this terminal instead of a page"),
            flag("--once", "with --text: one picture, and the end"),
        ),
        examples=("silofl watch", "silofl watch runs/first --text --once"),
        description="Follow a run's progress.jsonl and serve one read-only page on this machine until Ctrl-C: "
        "/ is the page, /events its stream, /metrics the numbers for Prometheus, /health for "
        "containers. At the server it shows all silos; at a hospital (a bundle, its folder or the "
        "state directory) that hospital's own row.",
    ),
)
