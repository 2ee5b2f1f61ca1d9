"""Commands of the hospital: ``check-data``, ``request``, ``check-bundle``, ``join``, ``policy``, ``audit``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from client.commands.table import Command, file_option, flag, option, several, text_option
from partitions.common.errors import UserError

if TYPE_CHECKING:
    from client.protocol.node import Site
    from partitions.silo_file import Check


def check_data(args: argparse.Namespace) -> None:
    from tempfile import TemporaryDirectory

    from client.importing import schema_at
    from client.protocol.code import code_of_data
    from partitions.own.dataset import resolve_name
    from partitions.own.index import write_index
    from partitions.silo_file import check_silo_file

    agreed = schema_at(args.schema) if args.schema else None
    with TemporaryDirectory() as folder:
        file = Path(args.file)
        if name := "" if file.exists() else resolve_name(args.file):
            file = Path(args.out or f"{folder}/index.npz")
            write_index(name, file)
        elif args.out:
            raise UserError(f"--out is of a data set MODULE:FUNCTION, and {args.file} is none")
        checks = check_silo_file(file, agreed=agreed)
    for check in checks:
        print(f"{'ok  ' if check.ok else 'FAIL'}  {check.name}: {check.detail}")
    bad = next((check for check in checks if not check.ok), None)
    if bad:
        raise UserError(f"{args.file}: {bad.detail}; {bad.fix}")
    if args.out:
        code = code_of_data(args.out)
        print(f"{args.out}: the index, without a sample; SHA-256 of the code: {code}")


def request_command(args: argparse.Namespace) -> None:
    from client.protocol.keys import make_request

    key, file, made_request = make_request(args.name, args.folder, args.out)
    print(
        f"{key}: the private key of {made_request.name}; it stays here, and is worth a backup"
    )
    print(
        f"{file}: send it to the server's operator, and tell them the key's fingerprint another way, to compare:"
    )
    print(made_request.fingerprint)


def check_bundle(args: argparse.Namespace) -> None:
    from client.site.trust.bundle import verify_bundle

    verify_bundle(args.bundle, args.signed_by, echo=print, allow_older=args.allow_older)


def join_command(args: argparse.Namespace) -> int:
    from client.site.runtime.supervisor import join as take_part

    return take_part(
        args.bundle,
        args.data,
        device=args.device,
        policy=args.policy,
        signed_by=args.signed_by,
        allow_older=args.allow_older,
        via=link_asked(args),
        slurm=args.slurm,
        echo=lambda line: print(line, flush=True),
    )


def link_asked(args: argparse.Namespace) -> Callable[[Any], Any] | None:
    """Return what makes a silo's link to the relay of `--via`; None without it. Raises UserError."""
    if not args.via and args.via_ca:
        raise UserError("--via-ca belongs to --via URL")
    if not args.via:
        return None
    from client.link.local_end import Link

    return partial(Link, args.via, ca_file=args.via_ca)


def silo_of_bundle(path: Path) -> Site:
    """Return the silo of a bundle's tar or folder, as `silofl join` runs it on this machine. Raises DataError."""
    from client.site.trust.bundle import read_bundle, site_of

    return site_of(read_bundle(path), Path())


def site_doctor(
    args: argparse.Namespace, echo: Callable[[str], None] = print
) -> tuple[str, list[Check]]:
    """Return the name and the checks of a site: of this container, or of a bundle."""
    import tempfile
    from contextlib import nullcontext
    from dataclasses import replace

    from client.link.local_end import Link
    from client.protocol.keys import site_root
    from client.protocol.node import Site
    from client.site.runtime.doctor import site_checks
    from client.site.trust.bundle import check_node_key, read_bundle, site_of, unpack_bundle
    from client.site.trust.signing import check_signed
    from partitions.own.index import as_file

    via = link_asked(args)
    # Mode 0700; deleted afterwards with the key
    with tempfile.TemporaryDirectory(prefix="silofl-") as place:
        folder, data = Path(place), args.data
        if args.what is None:
            site = Site.from_environment(os.environ)
            site = replace(
                site,
                data=as_file(data, folder, echo) if data else site.data,
                policy=str(args.policy or site.policy),
            )
            to_server = via(site) if via else Link.of_container(site, os.environ)
            with to_server or nullcontext() as link:
                return site.name, site_checks(site, link, args.slurm)
        files = read_bundle(args.what)
        site = site_of(files, Path())
        check_node_key(files, site)
        check_signed(
            files,
            site_root() / site.name,
            unpacked=args.what.is_dir(),
            echo=echo,
            remember=False,
        )
        if data is None and not site.data.is_file():
            raise UserError(
                f"there is no {site.data}, as the bundle's .env has it: name your data file with --data FILE"
            )
        unpack_bundle(files, folder)
        data = as_file(data, folder, echo) if data else None
        site = site_of(files, folder, data, policy=args.policy)
        with via(site) if via else nullcontext() as link:
            return site.name, site_checks(site, link, args.slurm)


def print_checks(checks: Iterable[Check], *, as_json: bool) -> None:
    """Print checks as a table, or as a JSON list."""
    from client.site.runtime import doctor

    print(doctor.as_json(checks) if as_json else doctor.table(checks))


def policy(args: argparse.Namespace) -> None:
    from client.policies import policy_at, policy_page

    print(policy_page(policy_at(args.what), methods=args.methods))


def audit_command(args: argparse.Namespace) -> None:
    from client.site.trust.audit_page import audit as read
    from client.site.trust.audit_page import find_log
    from client.study_record import export, key_file, record_page, show_export, study_record

    if args.check:
        faults = show_export(args.check, print)
    elif args.study:
        folder = find_log(args.where)
        record = study_record(folder, args.study, args.first, args.receipts)
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


AT_SITE = (
    text_option(
        "--via",
        "URL",
        "go through proxies to this relay of the server, https://HOST/link (default: directly)",
    ),
    file_option(
        "--via-ca", "FILE", "CA certificates to trust on the way to it, besides this system's"
    ),
    text_option(
        "--slurm",
        "PARTITION|OPTIONS",
        "train in jobs of Slurm: a partition, or options of sbatch in quotes (default: here)",
    ),
)
SIGNED_BY = (
    text_option(
        "--signed-by",
        "FINGERPRINT",
        "the consortium's signing key, as it was told to you: SHA256:..., or a file with the public key; "
        "nobody: the bundle may be unsigned (default: who signed this site's bundles before)",
    ),
    flag(
        "--allow-older",
        "take a signed bundle that is older than the newest that this site has taken",
    ),
)

COMMANDS = (
    Command(
        "check-data",
        "check a silo's data file before joining",
        check_data,
        (
            option("file", "FILE|MODULE:FUNCTION", "the .npz file, or a data set of your own"),
            option("--out", "FILE.npz", "of your own data set: write its index, to join with"),
            file_option(
                "--schema",
                "BUNDLE|FOLDER|FILE",
                "check it against the federation's schema: a bundle, its folder, or a .toml, .yaml or .json file",
            ),
        ),
        examples=(
            "silofl check-data ours.npz",
            "silofl check-data ours.npz --schema north.tar",
            "silofl check-data ward.data:ours --out ours.npz",
        ),
    ),
    Command(
        "request",
        "make this site's own key, and the request to be taken in",
        request_command,
        (
            option("name", "NAME", "the silo's name, as agreed with the server's operator"),
            file_option("--out", "FILE", "the request to write (default: NAME.request)"),
            file_option("--folder", "DIR", "for Docker: where key, request and bundle go"),
        ),
        examples=("silofl request north",),
        description="Make the site's private key, which stays here, and NAME.request for the server's "
        "operator: name, public key, signature. `silofl add-silo --request` makes a bundle of it, "
        "which holds no key.",
    ),
    Command(
        "check-bundle",
        "whose bundle this is, and whether Docker has the image that they signed",
        check_bundle,
        (
            file_option("bundle", "BUNDLE", "NAME.tar from silofl add-silo, or its folder"),
            *SIGNED_BY,
        ),
        examples=("silofl check-bundle north.tar --signed-by SHA256:...",),
        description="Check the consortium's signature over a bundle, or over the folder unpacked from it, and "
        "that the image that its containers start is the one that was signed. Who signed is "
        "remembered: from then on a bundle that is not signed, or by another key, is refused, here"
        " and by silofl join.",
    ),
    Command(
        "join",
        "take part as the silo of a bundle, without Docker",
        join_command,
        (
            file_option("bundle", "BUNDLE", "NAME.tar from silofl add-silo, or its folder"),
            file_option(
                "--data",
                "FILE|MODULE:FUNCTION",
                "this hospital's .npz file, or its own data set",
                required=True,
            ),
            text_option("--device", "DEVICE", "cpu or cuda:N (default: the bundle's)"),
            file_option(
                "--policy", "FILE", "this hospital's policy.toml (default: the bundle's)"
            ),
            *AT_SITE,
            *SIGNED_BY,
        ),
        examples=(
            "silofl join north.tar --data ours.npz --policy policy.toml",
            "silofl join north.tar --data ours.npz --device cuda:0 --slurm '-p gpu --gres=gpu:1 --mem=16G'",
            "silofl join north.tar --data ours.npz --via https://fl.example.org/link",
        ),
        description="Check data, address, certificate and key, then take part until Ctrl-C. In containers: "
        "unpack the bundle and read its README.md.",
    ),
    Command(
        "policy",
        "print what a hospital allows",
        policy,
        (
            file_option(
                "what",
                "BUNDLE|FOLDER|FILE",
                "a bundle, its folder, or a policy.toml (default: in a silo's container that silo's, else that of "
                "the silo that joined from this machine, else silofl's defaults)",
                nargs="?",
            ),
            flag("--methods", "what each method would send, and why one is refused"),
        ),
        examples=("silofl policy", "silofl policy policy.toml --methods"),
        description="The rules in force, whatever a run asks for, and the methods that may run.",
    ),
    Command(
        "audit",
        "what left this site, and whether its log of that is whole",
        audit_command,
        (
            file_option(
                "where",
                "STATE|BUNDLE|FOLDER",
                "a silo's state directory, its bundle, or the log's folder (default: the only silo here)",
                nargs="?",
            ),
            text_option("--month", "YYYY-MM", "which month (default: the last one)"),
            flag("--all-settings", "each run's settings that are silofl's defaults, too"),
            text_option("--seen", "HASH", "a last hash from before: is that line still there?"),
            option(
                "--first",
                "N",
                "the first line here: earlier ones lie elsewhere",
                type=int,
                default=1,
            ),
            several(
                "--receipts",
                "FILE",
                "the server's own copy of its receipts, receipts.jsonl of a run: does the log have what it signed?",
                type=Path,
            ),
            text_option("--study", "NAME", "what left in a study, as a committee gets it"),
            file_option("--export", "FILE", "with --study: write that as JSON, signed"),
            file_option(
                "--sign-with", "FILE", "the silo's private key (default: the one here)"
            ),
            file_option(
                "--check", "FILE", "a file of --export: who signed it, and what it says"
            ),
        ),
        examples=(
            "silofl audit",
            "silofl audit --month 2026-11",
            "silofl audit --study sepsis --export sepsis.json",
        ),
        description="Follow the chain of the site's audit log, and print a month of it: per run who asked, "
        "when, how often, what, how many bytes. Exit code 2 where a line was changed, taken out, "
        "moved or cut off.",
    ),
)
