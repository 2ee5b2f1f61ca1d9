"""Commands of the hospital about studies: ``approve``, ``studies``, ``revoke``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from partitions.common.errors import UserError


def add_commands(commands: Any) -> None:
    """Add this group to ``silofl``."""
    add_approve(commands)
    add_studies(commands)
    add_revoke(commands)


def add_approve(commands: Any) -> None:
    """Add ``approve``."""
    p = commands.add_parser(
        "approve",
        help="approve a study at this hospital",
        description="Show a study, check its signature and this hospital's policy, warn of what is known to be "
        "dangerous, ask, and keep the approval. Runs within the study are answered from then on, until it ends.",
    )
    p.add_argument("file", metavar="FILE", type=Path, help="the study, study.toml")
    add_state_dir(p)
    p.add_argument(
        "--policy", metavar="FILE", type=Path, help="this hospital's policy.toml (default: the silo's, as far as known)"
    )
    p.add_argument("--yes", action="store_true", help="approve without a question; needs --by")
    add_by(p)
    p.add_argument(
        "--signed-by",
        metavar="FINGERPRINT",
        default="",
        help="who has to have signed it: SHA256:... or a file with the public key; 'nobody' takes an unsigned one "
        "(default: who signed this silo's bundle)",
    )
    p.add_argument("--samples", metavar="N", type=int, help="this hospital's training samples, for the warnings")
    p.add_argument(
        "--weights", metavar="FILE", type=Path, help="the study's initial weights: is a layer made to read records?"
    )
    p.set_defaults(run=approve)


def add_studies(commands: Any) -> None:
    """Add ``studies``."""
    p = commands.add_parser("studies", help="the studies of this hospital, what is used of their limits, and what left")
    add_state_dir(p)
    p.add_argument("--json", action="store_true", help="as JSON")
    p.set_defaults(run=studies)


def add_revoke(commands: Any) -> None:
    """Add ``revoke``."""
    p = commands.add_parser(
        "revoke", help="end a study at this hospital at once", description="Its next message is refused."
    )
    p.add_argument("name", metavar="NAME", help="the study's name")
    add_state_dir(p)
    add_by(p)
    p.set_defaults(run=revoke)


def add_state_dir(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--state-dir",
        metavar="DIR",
        type=Path,
        help="the silo's state directory (default: this container's, or of the only silo that joined from here)",
    )


def add_by(p: argparse.ArgumentParser) -> None:
    p.add_argument("--by", metavar="NAME", default="", help="who decides, for the audit log")


def approve(args: argparse.Namespace) -> None:
    from client.studies import approve as approve_study

    if not args.yes and not sys.stdin.isatty():
        raise UserError("there is no terminal to ask at: --yes --by NAME approves without a question")
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
    from client.studies import overview, overview_page, released, released_page

    found = overview(args.state_dir)
    if args.json:
        print(json.dumps(found, indent=1))
        return
    print(overview_page(found))
    if text := released_page(released(args.state_dir)):
        print(text)


def revoke(args: argparse.Namespace) -> None:
    from client.studies import revoke as revoke_study

    by = args.by or os.environ.get("SUDO_USER") or os.environ.get("USER") or f"user {os.getuid()}"
    revoke_study(args.name, args.state_dir, by)
    print(f"revoked: {args.name}; its next message is refused")
