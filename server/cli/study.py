"""Commands of a study: ``study new``, ``study check``, ``study sign``, ``study show``."""

from __future__ import annotations

import argparse
from datetime import date
from pathlib import Path
from typing import Any

from partitions.common.errors import UserError
from server.cli.research import add_run_options, run_values

TEXTS = {
    "purpose": "the question, for a research committee",
    "contact": "who answers for the study",
    "results": "who may see the results",
    "retention": "who keeps what, and how long",
}


def add_commands(commands: Any) -> None:
    """Add the commands of this group to the parser."""
    p = commands.add_parser(
        "study",
        help="write, check, sign or show a study that hospitals approve",
        description="A study says what hospitals approve: question, methods, settings, software, limits, dates. "
        "A hospital approves it with silofl approve; a run belongs to it by --set study=NAME.",
    )
    actions = p.add_subparsers(dest="action", required=True, metavar="ACTION")
    add_new(actions)
    add_check(actions)
    add_sign(actions)
    add_show(actions)


def add_new(actions: Any) -> None:
    """Add the command ``study new``."""
    p = actions.add_parser("new", help="write a study's draft from a run's settings")
    p.add_argument("file", metavar="FILE", type=Path, help="the file to write, study.toml")
    p.add_argument("--name", metavar="NAME", required=True, help="the study's name")
    for key, help in TEXTS.items():
        p.add_argument(f"--{key}", metavar="TEXT", default="", help=help)
    p.add_argument("--end", metavar="YYYY-MM-DD", type=day, help="its last day (default: in a year)")
    p.add_argument(
        "--app", metavar="DIR", type=Path, default=Path(), help="the checkout whose app runs (default: this directory)"
    )
    p.add_argument("--sum", metavar="SHA256", action="append", default=[], help="or the sum of an app's build")
    p.add_argument("--schema", metavar="FILE", type=Path, help="the federation's schema: no run has another")
    p.add_argument("--held-out", metavar="SILO", action="append", default=[], help="a hospital that does not train")
    p.add_argument("--bytes", metavar="N", type=int, default=10**9, help="bytes that leave a hospital (default: 10⁹)")
    p.add_argument("--overwrite", action="store_true", help="replace FILE")
    add_run_options(p)
    p.set_defaults(run=new)


def day(text: str) -> date:
    return date.fromisoformat(text)


def add_check(actions: Any) -> None:
    """Add the command ``study check``."""
    p = actions.add_parser("check", help="is a study complete, can it run, and who signed it?")
    p.add_argument("file", metavar="FILE", type=Path, help="the study")
    p.set_defaults(run=check)


def add_sign(actions: Any) -> None:
    """Add the command ``study sign``."""
    p = actions.add_parser(
        "sign",
        help="sign a study with the consortium's key",
        description="Sign a study in place. A change after that is found, and wants a new signature.",
    )
    p.add_argument("file", metavar="FILE", type=Path, help="the study")
    p.add_argument(
        "--federation",
        metavar="FEDERATION.yaml",
        type=Path,
        default=Path("federation.yaml"),
        help="whose signing key (default: federation.yaml)",
    )
    p.add_argument("--sign-with", metavar="FILE", type=Path, help="the signing key (default: of silofl signing-key)")
    p.set_defaults(run=sign)


def add_show(actions: Any) -> None:
    """Add the command ``study show``."""
    p = actions.add_parser("show", help="a study in words: what leaves, what can be inferred, how much at most")
    p.add_argument("file", metavar="FILE", type=Path, help="the study")
    p.set_defaults(run=show)


def new(args: argparse.Namespace) -> None:
    from partitions.common.files import write_atomically
    from partitions.schema import load_schema
    from server.deploy.study_draft import app_sums, draft

    if args.file.exists() and not args.overwrite:
        raise UserError(f"{args.file} is there already: --overwrite replaces it")
    texts = {key: getattr(args, key) for key in TEXTS}
    apps = args.sum or app_sums(args.app)
    text = draft(
        args.name,
        run_values(args),
        texts=texts,
        end=args.end,
        apps=apps,
        bytes_=args.bytes,
        schema=load_schema(args.schema).digest if args.schema else "",
        held_out=args.held_out,
    )
    write_atomically(args.file, text)
    empty = [key for key, found in texts.items() if not found]
    if empty:
        print(f"write {', '.join(empty)} into it")
    print(f"then: silofl study check {args.file}; silofl study sign {args.file}")
    print(args.file)


def check(args: argparse.Namespace) -> None:
    from client.site.study.signature import signer_of
    from server.deploy.study_draft import check as check_study

    text = args.file.read_text(encoding="utf-8")
    study = check_study(text, str(args.file))
    signer = signer_of(text)
    print(f"ok    {study.name}: complete, and {', '.join(study.methods)} can run with these settings")
    print(f"ok    signed by {signer}" if signer else f"note  not signed: silofl study sign {args.file}")


def sign(args: argparse.Namespace) -> None:
    from client.site.study.signature import signed, signer_of
    from client.site.trust.signing import load_signing_key
    from partitions.common.files import write_atomically
    from server.deploy.bundle import signing_key_file
    from server.deploy.federation import read_federation
    from server.deploy.study_draft import check as check_study

    text = args.file.read_text(encoding="utf-8")
    check_study(text, str(args.file))
    file = args.sign_with or signing_key_file(read_federation(args.federation))
    text = signed(text, load_signing_key(file))
    write_atomically(args.file, text)
    print(f"signed by {signer_of(text)}")


def show(args: argparse.Namespace) -> None:
    from client.site.study.signature import signer_of
    from client.studies import read_file, study_page

    text, study = read_file(args.file)
    print(study_page(study, signer_of(text)))
