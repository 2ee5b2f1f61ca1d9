"""Commands about the people who run a federation: ``operator add``, ``operator log``."""

from __future__ import annotations

import argparse

from client.commands.table import Command, choice, option
from partitions.common.errors import UserError
from server.cli.options import WHOSE, federation_of


def add(args: argparse.Namespace) -> None:
    from partitions.common.names import check_silo_name
    from server.deploy.access.operators import Operator, key_file, make_key

    check_silo_name(args.name)
    file = key_file()
    operator = Operator(name=args.name, role=args.role, key=make_key(file))
    print(f"{file}: the private key of {args.name}; it stays here, and signs your calls")
    print("this line belongs into `operators:` of federation.yaml, then: silofl up")
    print(f'  - {{name: {operator.name}, role: {operator.role}, key: "{operator.key}"}}')


def log(args: argparse.Namespace) -> None:
    from server.deploy.access.operators import log_of

    verdict = log_of(federation_of(args.federation).name).verify()
    for line in verdict.entries:
        print(
            f"{line['time']}  {line['name']} ({line['role']})  {line['action']}  {line['outcome']}  {line['digest']}"
        )
    if verdict.faults:
        raise UserError(
            f"the log is not whole, {len(verdict.faults)} faults: {verdict.faults[0]}"
        )
    last = (
        f", the last one is {verdict.entries[-1]['hash']}: keep it elsewhere"
        if verdict.entries
        else ""
    )
    print(f"{len(verdict.entries)} lines, none changed, missing or moved{last}")


COMMANDS = (
    Command(
        "operator",
        "the people who may call the server, and what they did",
        actions=(
            Command(
                "add",
                "make your key, and the line for federation.yaml",
                add,
                (
                    option("name", "NAME", "who you are in the log"),
                    choice(
                        "--role",
                        ("viewer", "operator", "owner"),
                        "viewer: status and watch; operator: run and stop, too; owner: all",
                        "viewer",
                    ),
                ),
                examples=("silofl operator add alice --role operator",),
                description="Make this person's key, unless it is there, and print the line with its fingerprint. "
                "SILOFL_OPERATOR_KEY names another file for it. With a line in `operators:` the server refuses every "
                "call that none of these keys has signed.",
            ),
            Command(
                "log",
                "what was asked of the server, by whom, and whether the log is whole",
                log,
                (WHOSE,),
                examples=("silofl operator log",),
            ),
        ),
    ),
)
