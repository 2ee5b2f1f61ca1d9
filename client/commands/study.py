"""Commands of the hospital about studies: ``approve``, ``studies``, ``revoke``."""

from __future__ import annotations

import argparse
import json
import os
import sys

from client.commands.table import Command, file_option, flag, option, text_option
from partitions.common.errors import UserError


def approve_command(args: argparse.Namespace) -> None:
    from client.studies import approve_study, silo_at

    if args.restored:
        from client.site.budget.restored import accept_restored

        if not args.by:
            raise UserError("--by NAME is missing: the audit log says who accepted the copy")
        place = silo_at(args.state_dir, args.policy)
        count = accept_restored(place.state, place.name, args.by)
        print(
            f"accepted: {count} charges that the copy lacked were added; every study is revoked: silofl approve FILE"
        )
        return
    if args.file is None:
        raise UserError("FILE is missing: the study to approve, study.toml")
    if not args.yes and not sys.stdin.isatty():
        raise UserError(
            "there is no terminal to ask at: --yes --by NAME approves without a question"
        )
    study = approve_study(
        args.file,
        args.state_dir,
        policy=args.policy,
        by=args.by,
        signed_by=args.signed_by,
        ask=None if args.yes else input,
        echo=print,
        samples=args.samples,
        weights=args.weights,
    )
    print(f"approved: {study.name}, until {study.end}; silofl revoke {study.name} ends it")


def studies(args: argparse.Namespace) -> None:
    from client.studies import list_released, overview, overview_page, released_page

    here = overview(args.state_dir)
    if args.json:
        print(json.dumps(here, indent=1))
        return
    print(overview_page(here))
    if text := released_page(list_released(args.state_dir)):
        print(text)


def revoke_command(args: argparse.Namespace) -> None:
    from client.studies import revoke_study

    by = (
        args.by
        or os.environ.get("SUDO_USER")
        or os.environ.get("USER")
        or f"user {os.getuid()}"
    )
    revoke_study(args.name, args.state_dir, by)
    print(f"revoked: {args.name}; its next message is refused")


BY = (text_option("--by", "NAME", "who decides, for the audit log"),)

STATE_DIR = (
    file_option(
        "--state-dir",
        "DIR",
        "the silo's state directory (default: this container's, or of the only silo that joined from here)",
    ),
)

COMMANDS = (
    Command(
        "approve",
        "approve a study at this hospital",
        approve_command,
        (
            file_option("file", "FILE", "the study, study.toml", nargs="?"),
            *STATE_DIR,
            file_option(
                "--policy",
                "FILE",
                "this hospital's policy.toml (default: the silo's, as far as known)",
            ),
            flag("--yes", "approve without a question; needs --by"),
            flag(
                "--restored",
                "in place of FILE: go on with a restored state directory; what the head beside it had spent is "
                "charged, and every study is revoked; needs --by",
            ),
            *BY,
            text_option(
                "--signed-by",
                "FINGERPRINT",
                "who has to have signed it: SHA256:... or a file with the public key; 'nobody' takes an "
                "unsigned one (default: who signed this silo's bundle)",
            ),
            option(
                "--samples", "N", "this hospital's training samples, for the warnings", type=int
            ),
            file_option(
                "--weights",
                "FILE",
                "the study's initial weights: is a layer made to read records?",
            ),
        ),
        examples=("silofl approve study.toml",),
        description="Show a study, check its signature and this hospital's policy, warn of what is known to be"
        " dangerous, ask, and keep the approval. Runs within the study are answered from then on, "
        "until it ends.",
    ),
    Command(
        "studies",
        "the studies of this hospital, what is used of their limits, and what left",
        studies,
        (*STATE_DIR, flag("--json", "as JSON")),
        examples=("silofl studies",),
    ),
    Command(
        "revoke",
        "end a study at this hospital at once",
        revoke_command,
        (option("name", "NAME", "the study's name"), *STATE_DIR, *BY),
        examples=("silofl revoke sepsis",),
        description="Its next message is refused.",
    ),
)
