"""Commands of the hospital: ``check-data``, ``request``, ``check-bundle``, ``join``, ``policy``, ``audit``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from client.commands.data import add_import, add_schema
from partitions.common.errors import UserError


def add_commands(commands: Any) -> None:
    """Add this group to ``silofl``."""
    add_check_data(commands)
    add_import(commands)
    add_schema(commands)
    add_request(commands)
    add_check_bundle(commands)
    add_join(commands)
    add_policy(commands)
    add_audit(commands)


def add_check_data(commands: Any) -> None:
    """Add ``check-data``."""
    p = commands.add_parser("check-data", help="check a silo's data file before joining")
    p.add_argument("file", metavar="FILE", help="the .npz file")
    p.add_argument(
        "--schema",
        metavar="BUNDLE|FOLDER|FILE",
        type=Path,
        help="check it against the federation's schema: a bundle, its folder, or a .toml, .yaml or .json file",
    )
    p.set_defaults(run=check_data)


def add_request(commands: Any) -> None:
    """Add ``request``."""
    p = commands.add_parser(
        "request",
        help="make this site's own key, and the request to be taken in",
        description="Make the site's private key, which stays here, and NAME.request for the server's operator: name, "
        "public key, signature. `silofl add-silo --request` makes a bundle of it, which holds no key.",
    )
    p.add_argument("name", metavar="NAME", help="the silo's name, as agreed with the server's operator")
    p.add_argument("--out", metavar="FILE", type=Path, help="the request to write (default: NAME.request)")
    p.add_argument("--folder", metavar="DIR", type=Path, help="for Docker: where key, request and bundle go")
    p.set_defaults(run=request)


def add_check_bundle(commands: Any) -> None:
    """Add ``check-bundle``."""
    p = commands.add_parser(
        "check-bundle",
        help="whose bundle this is, and whether Docker has the image that they signed",
        description="Check the consortium's signature over a bundle, or over the folder unpacked from it, and that "
        "the image that its containers start is the one that was signed. Who signed is remembered: from then on a "
        "bundle that is not signed, or by another key, is refused, here and by silofl join.",
    )
    p.add_argument("bundle", metavar="BUNDLE", type=Path, help="NAME.tar from silofl add-silo, or its folder")
    add_signed_by(p)
    p.set_defaults(run=check_bundle)


def add_join(commands: Any) -> None:
    """Add ``join``."""
    p = commands.add_parser(
        "join",
        help="take part as the silo of a bundle, without Docker",
        description="Check data, address, certificate and key, then take part until Ctrl-C. In containers: unpack "
        "the bundle and read its README.md.",
    )
    p.add_argument("bundle", metavar="BUNDLE", type=Path, help="NAME.tar from silofl add-silo, or its folder")
    p.add_argument("--data", metavar="FILE", type=Path, required=True, help="this hospital's .npz file")
    p.add_argument("--device", metavar="DEVICE", default="", help="cpu or cuda:N (default: the bundle's)")
    p.add_argument("--policy", metavar="FILE", type=Path, help="this hospital's policy.toml (default: the bundle's)")
    add_signed_by(p)
    p.set_defaults(run=join)


def add_policy(commands: Any) -> None:
    """Add ``policy``."""
    p = commands.add_parser(
        "policy",
        help="print what a hospital allows, and what each method would send under it",
        description="The rules in force, whatever a run asks for, and for each method whether it may run and what it "
        "sends.",
    )
    p.add_argument(
        "what",
        metavar="BUNDLE|FOLDER|FILE",
        nargs="?",
        type=Path,
        help="a bundle, its folder, or a policy.toml (default: in a silo's container that silo's, else the defaults)",
    )
    p.set_defaults(run=policy)


def add_audit(commands: Any) -> None:
    """Add ``audit``."""
    p = commands.add_parser(
        "audit",
        help="what left this site, and whether its log of that is whole",
        description="Follow the chain of the site's audit log, and print a month of it: per run who asked, when, how "
        "often, what, how many bytes. Exit code 2 where a line was changed, taken out, moved or cut off.",
    )
    p.add_argument(
        "where",
        metavar="STATE|BUNDLE|FOLDER",
        nargs="?",
        type=Path,
        help="a silo's state directory, its bundle, or the log's folder (default: the only silo here)",
    )
    p.add_argument("--month", metavar="YYYY-MM", default="", help="which month (default: the last one)")
    p.add_argument("--all-settings", action="store_true", help="each run's settings that are silofl's defaults, too")
    p.add_argument("--seen", metavar="HASH", default="", help="a last hash from before: is that line still there?")
    p.add_argument("--first", metavar="N", type=int, default=1, help="the first line here: earlier ones lie elsewhere")
    p.add_argument(
        "--receipts",
        metavar="FILE",
        action="append",
        type=Path,
        default=[],
        help="the server's own copy of its receipts, receipts.jsonl of a run: does the log have what it signed?",
    )
    p.add_argument("--study", metavar="NAME", default="", help="what left in a study, as a committee gets it")
    p.add_argument("--export", metavar="FILE", type=Path, help="with --study: write that as JSON, signed")
    p.add_argument("--sign-with", metavar="FILE", type=Path, help="the silo's private key (default: the one here)")
    p.add_argument("--check", metavar="FILE", type=Path, help="a file of --export: who signed it, and what it says")
    p.set_defaults(run=audit)


def add_signed_by(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--signed-by",
        metavar="FINGERPRINT",
        default="",
        help="the consortium's signing key, as it was told to you: SHA256:..., or a file with the public key; "
        "nobody: the bundle may be unsigned (default: who signed this site's bundles before)",
    )
    p.add_argument(
        "--allow-older",
        action="store_true",
        help="take a signed bundle that is older than the newest that this site has taken",
    )


def check_data(args: argparse.Namespace) -> None:
    from client.tables.importing import schema_at
    from partitions.silo_file import check_silo_file

    checks = check_silo_file(args.file, agreed=schema_at(args.schema) if args.schema else None)
    for check in checks:
        print(f"{'ok  ' if check.ok else 'FAIL'}  {check.name}: {check.detail}")
    bad = next((check for check in checks if not check.ok), None)
    if bad:
        raise UserError(f"{args.file}: {bad.detail}; {bad.fix}")


def request(args: argparse.Namespace) -> None:
    from client.site.trust.request import make_request

    key, file, asked = make_request(args.name, args.folder, args.out)
    print(f"{key}: the private key of {asked.name}; it stays here, and is worth a backup")
    print(f"{file}: send it to the server's operator, and tell them the key's fingerprint another way, to compare:")
    print(asked.fingerprint)


def check_bundle(args: argparse.Namespace) -> None:
    from client.site.trust.bundle import check

    check(args.bundle, args.signed_by, echo=print, allow_older=args.allow_older)


def join(args: argparse.Namespace) -> int:
    from client.site.runtime.join import join as take_part

    return take_part(
        args.bundle,
        args.data,
        device=args.device,
        policy=args.policy,
        signed_by=args.signed_by,
        allow_older=args.allow_older,
        echo=lambda line: print(line, flush=True),
    )


def policy(args: argparse.Namespace) -> None:
    from client.policies import policy_at, policy_page

    print(policy_page(policy_at(args.what)))


def audit(args: argparse.Namespace) -> None:
    from client.site.trust.audit import verify
    from client.site.trust.audit_page import audit as read
    from client.site.trust.audit_page import find_log
    from client.study_record import export, key_file, record_page, show_export, study_record

    if args.check:
        faults = show_export(args.check, print)
    elif args.study:
        folder = find_log(args.where)
        record = study_record(verify(folder, args.first), folder, args.study, args.receipts)
        print(record_page(record))
        faults = [*record["log"]["faults"], *record["receipts"]["faults"]]
        if args.export:
            print(f"signed by {export(record, args.export, key_file(folder, args.sign_with))}")
            print(args.export)
    elif args.export or args.sign_with:
        raise UserError("--export and --sign-with belong to --study NAME")
    else:
        places = (args.where, args.month, args.seen, args.first, args.receipts)
        text, faults = read(*places, all_settings=args.all_settings)
        print(text)
    if faults:
        raise UserError(f"the audit log is not whole, {len(faults)} faults: {faults[0]}")
