"""Command ``watch``."""

from __future__ import annotations

import argparse

from client.commands.table import Command, flag, option
from partitions.common.errors import UserError
from server.cli.options import HOST, TOKEN_FILE


def watch(args: argparse.Namespace) -> None:
    from server.watch.access import token_for
    from server.watch.source import find_source

    if args.once and not args.text:
        raise UserError("--once: one picture is for a terminal; add --text")
    source = find_source(args.what)
    if args.text:
        from server.watch.text import show

        show(source, once=args.once)
        return
    from server.watch.serve import serve

    serve(source, args.host, args.port, token_for(args.host, args.token_file))


COMMANDS = (
    Command(
        "watch",
        "show a run as it goes on: a page, a terminal, numbers for Prometheus",
        watch,
        (
            option(
                "what",
                "RUN|CONNECTION",
                "a run directory, a folder whose newest run is shown, a flwr connection, or a silo's bundle or"
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
