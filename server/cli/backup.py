"""Commands that copy a server or a silo, and put the copy in place elsewhere: ``backup``, ``restore``."""

from __future__ import annotations

import argparse
from pathlib import Path

from client.commands.study import STATE_DIR
from client.commands.table import Command, file_option, flag, several
from partitions.common.errors import UserError
from server.cli.options import FEDERATION, federation_of

PASSPHRASE = file_option(
    "--passphrase-file",
    "FILE",
    "encrypt with the passphrase in its first line; age --decrypt reads such a file too",
)


def backup(args: argparse.Namespace) -> None:
    from client.backup.archive import read_passphrase
    from client.backup.silo import back_up_silo
    from client.studies import silo_at
    from server.deploy.local.backup import back_up_server

    passphrase = read_passphrase(args.passphrase_file)
    if args.silo or args.state_dir:
        if args.include:
            raise UserError("--include is of a server's backup")
        place = silo_at(args.state_dir)
        manifest = back_up_silo(place.name, place.state, args.out, passphrase)
        print(f"the head is not in it: keep {place.state}.head/head.json apart from this file")
    else:
        federation = federation_of(str(args.federation))
        manifest = back_up_server(federation, args.include, args.out, passphrase)
    secret = (
        "encrypted" if passphrase else "not encrypted, and private keys or models are in it"
    )
    print(
        f"{args.out}: the {manifest.of} {manifest.name}, {len(manifest.files)} files, {secret}"
    )


def restore(args: argparse.Namespace) -> None:
    from client.backup.archive import open_backup, read_passphrase
    from client.backup.silo import restore_silo
    from partitions.common.files import state_home
    from server.deploy.local.backup import restore_server

    beside = args.state_dir or state_home()
    beside = beside if beside.is_dir() else beside.absolute().parent
    passphrase = read_passphrase(args.passphrase_file)
    with open_backup(args.file, passphrase, beside) as (manifest, folder):
        print(
            f"{args.file}: the {manifest.of} {manifest.name} of {manifest.time}, every sum is right"
        )
        if args.check:
            return
        if manifest.of == "silo":
            state = restore_silo(manifest, folder, args.state_dir)
            print(
                f"{state}: nothing leaves from it before `silofl approve --restored --by NAME`, which needs the head "
                f"that was kept apart in {state}.head"
            )
            return
        if args.state_dir:
            raise UserError("--state-dir is of a silo's backup")
        state = restore_server(manifest, folder, Path.cwd())
        print(f"{state}: `silofl up` starts it, with the keys that hospitals know")


COMMANDS = (
    Command(
        "backup",
        "copy what a server, or a silo, needs elsewhere",
        backup,
        (
            file_option(
                "federation", "FEDERATION.yaml", "of a server", nargs="?", default=FEDERATION
            ),
            flag(
                "--silo", "of the silo in this container, or the only one that joined from here"
            ),
            *STATE_DIR,
            several(
                "--include", "RUN", "of a server: a run directory too, to resume it", type=Path
            ),
            file_option("--out", "FILE", "the backup to write, mode 0600", required=True),
            PASSPHRASE,
        ),
        examples=(
            "silofl backup federation.yaml --include runs/first --out server.backup --passphrase-file secret",
            "silofl backup --silo --out north.backup",
        ),
        description="Copy keys, registrations and state, with checksums, while all goes on. Data are not in it. The "
        "head of a silo is not in it either: keep it apart.",
    ),
    Command(
        "restore",
        "put a backup in place",
        restore,
        (
            file_option("file", "FILE", "a file of silofl backup"),
            file_option("--state-dir", "DIR", "of a silo: where its state goes, alone"),
            flag("--check", "verify it, and restore nothing"),
            PASSPHRASE,
        ),
        examples=("silofl restore north.backup",),
        description="Verify every checksum, then put the files where silofl looks for them. Nothing is overwritten. A "
        "restored silo trains again after silofl approve --restored.",
    ),
)
