"""The command line of prefork: `serve SOCKET`, `once FD`, `shim DIRECTORY` (by `client/site/private.py`)."""

import argparse
import socket
from pathlib import Path

from .install import install_shim
from .template import PRELOAD, serve
from .watchdog import mind


def main() -> None:
    """Run the template process (`serve SOCKET`), one task without it (`once FD`), or install the shim (`shim DIR`)."""
    parser = argparse.ArgumentParser(prog="prefork.commands", description="Prefork for Flower SuperNodes.")
    commands = parser.add_subparsers(dest="command", required=True)
    server = commands.add_parser("serve", help="run the template process")
    server.add_argument("socket", type=Path)
    server.add_argument("--import", dest="modules", action="append", help="a module to import ahead (repeat)")
    once = commands.add_parser("once", help="run the one task that comes over an open socket")
    once.add_argument("fd", type=int)
    shim = commands.add_parser("shim", help="write the flwr-clientapp that goes first on PATH")
    shim.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "serve":
        serve(arguments.socket.absolute(), tuple(arguments.modules or PRELOAD))
    elif arguments.command == "once":
        mind(socket.socket(fileno=arguments.fd))
    else:
        print(install_shim(arguments.directory))
