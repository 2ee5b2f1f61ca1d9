"""`silofl relay`: the server's end of the links of hospitals behind proxies."""

from __future__ import annotations

import argparse

from client.commands.table import Command, file_option, option
from partitions.common.errors import UserError
from server.cli.options import WHOSE, federation_of


def relay_command(args: argparse.Namespace) -> None:
    from client.link.connection import split_address
    from client.protocol.launch import LOOPBACK
    from server.deploy.bundle import fleet_port
    from server.deploy.control import read_connection
    from server.deploy.relay import relay as serve
    from server.deploy.relay import tls_of

    host, port, fault = split_address(args.listen)
    if fault:
        raise UserError(f"--listen {args.listen}: {fault.detail}; use HOST:PORT")
    context = tls_of(args.certificate, args.key)
    federation = federation_of(args.federation)
    connection = read_connection(federation.name)

    fleet = (LOOPBACK, fleet_port(federation))
    try:
        serve((host, port), fleet, connection, context, lambda line: print(line, flush=True))
    except OSError as error:
        raise UserError(f"the relay cannot start: {error}") from None


COMMANDS = (
    Command(
        "relay",
        "let hospitals behind proxies that open TLS reach the server",
        relay_command,
        (
            WHOSE,
            option(
                "--listen",
                "HOST:PORT",
                "where it listens, for a web server in front of it (default: %(default)s)",
                default="127.0.0.1:8082",
            ),
            file_option("--certificate", "FILE", "speak TLS itself, with this certificate"),
            file_option("--key", "FILE", "the certificate's key"),
        ),
        examples=(
            "silofl relay",
            "silofl relay --listen 0.0.0.0:443 --certificate chain.pem --key key.pem",
        ),
        description="Run beside the server: take links at /link from registered silos (silofl join --via), and "
        "connect each to the Fleet port, and to nothing else.",
    ),
)
