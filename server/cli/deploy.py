"""Commands of a deployment: keys, compose file, adding and removing silos, checks."""

from __future__ import annotations

import argparse
import os
import re
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from client.cli import AT_SITE, print_checks, site_doctor
from client.commands.table import Command, file_option, flag, option
from partitions.common.errors import UserError
from server.cli.options import FEDERATION, FILE, SIGN_WITH, WHOSE, federation_of

if TYPE_CHECKING:
    from client.protocol.envelope import PrivateKey
    from client.protocol.keys import JoinRequest
    from server.deploy.bundle import Bundle
    from server.deploy.federation import Federation


def compose(args: argparse.Namespace) -> None:
    from partitions.common.files import write_atomically
    from partitions.common.output import print_document
    from server.deploy.compose import compose_file
    from server.deploy.federation import read_federation
    from server.deploy.submit import app_directory

    out = args.out or Path("docker-compose.yml")
    text = compose_file(read_federation(args.file), out.absolute().parent, app_directory())
    if args.out:
        write_atomically(args.out, text)
        print(args.out)
    else:
        print_document(text)


def credentials(args: argparse.Namespace) -> None:
    from client.protocol.launch import THIS_MACHINE
    from server.deploy import compose as deployed
    from server.deploy.credentials import (
        NEW_CA,
        RENEW,
        dates_check,
        ensure_credentials,
        load_certificate,
    )
    from server.deploy.federation import read_federation
    from server.deploy.local.record import state_directory

    federation = read_federation(args.file, check_data=False)
    compose = args.file.absolute().parent / "docker-compose.yml"
    if deployed.containers_exist(compose):
        containers = deployed.connect(federation, compose)
        print(
            f"connection {containers.connection.name} ({containers.connection.address}); runs land in {containers.runs}"
        )
        return
    files = ensure_credentials(
        state_directory(federation.name) / "credentials",
        silos=[silo.name for silo in federation.silos],
        hosts={*THIS_MACHINE, federation.server.address, federation.server.public_host},
    )
    for check in (
        dates_check("CA", load_certificate(files.ca_certificate), NEW_CA),
        dates_check("server", load_certificate(files.server_certificate), RENEW),
    ):
        print(f"{check.name}: {check.detail}")
    print(
        f"keys of {len(federation.silos)} silos in {files.directory}; `silofl up` writes the connection"
    )


def print_bundle(
    federation: Federation,
    name: str,
    out: Path,
    request: JoinRequest | None,
    bundle: Bundle,
    key: PrivateKey | None,
) -> None:
    """Print what to do with a silo's bundle."""
    from client.protocol.envelope import fingerprint, public_pem
    from client.protocol.launch import THIS_MACHINE

    if (address := federation.server.public_host) in THIS_MACHINE:
        hint = f"server.address in {federation.path} is {address}: this bundle works on this machine only"
        print(hint, file=sys.stderr)
    if request:
        print(
            f"{name} has the key {request.fingerprint}: compare it with what the hospital tells you"
        )
        print(f"{out}: hand it to {name}; no private key is in it")
    else:
        print(f"{out}: hand it to {name} as the secret it is")
    if key:
        print(f"signed by {fingerprint(public_pem(key))}")
        if not bundle.images:
            missing = f"Docker has no {bundle.image_name} here, so the signature names no image"
            print(f"{missing}: --image NAME@sha256:... does", file=sys.stderr)


def add_silo_command(args: argparse.Namespace) -> None:
    from client.protocol.keys import load_signing_key, read_request
    from server.deploy import bundle
    from server.deploy.control import Control, read_connection
    from server.deploy.federation import DEVICE
    from server.deploy.local.record import only_one, state_directory
    from server.deploy.submit import app_directory

    if not re.fullmatch(DEVICE, args.device):
        raise UserError(f"--device {args.device}: no device; use cpu, or cuda:0 and so on")
    federation = federation_of(args.federation)
    request = read_request(args.request) if args.request else None
    name = args.name or (request.name if request else "")
    if not name:
        raise UserError(
            "give a NAME, or --request FILE: `silofl request NAME` at the hospital makes it"
        )
    if request and name != request.name:
        raise UserError(
            f"{args.request} is a request of {request.name}, not of {name}: leave the name away"
        )
    out = args.out or Path(f"{name}.tar")
    kept = args.sign_with or bundle.signing_key_file(federation)
    key = load_signing_key(kept) if args.sign_with or kept.exists() else None
    connection = read_connection(federation.name)
    # `silofl up` unregisters for good a key that it finds no file of
    with only_one(state_directory(federation.name)), Control(connection) as control:
        handed_out = bundle.add_silo(
            federation,
            control,
            name,
            out,
            fleet_port=bundle.fleet_port(federation),
            app=app_directory(),
            device=args.device,
            image=args.image,
            request=request,
            signing_key=key,
        )
    print_bundle(federation, name, out, request, handed_out, key)


def signing_key(args: argparse.Namespace) -> None:
    from client.protocol.envelope import fingerprint, public_pem
    from client.protocol.keys import make_signing_key
    from partitions.common.files import check_replaced, write_atomically
    from server.deploy.bundle import signing_key_file
    from server.deploy.federation import read_federation
    from server.deploy.local.record import state_directory

    path: Path | None = args.out
    if path is None:
        federation = read_federation(args.file, check_data=False)
        state_directory(federation.name)  # raises UserError if it cannot be created
        path = signing_key_file(federation)
    beside = path.with_suffix(".pub")
    if beside == path:
        raise UserError(f"--out {path}: .pub is for the public half; give the key another name")
    check_replaced(beside, "public key", lambda file: b" PUBLIC KEY" in file.read(32))
    public = public_pem(make_signing_key(path))
    write_atomically(beside, public)
    print(
        f"{path}: the key that signs bundles; keep it, and a backup, where the bundles' carriers are not"
    )
    print(
        "tell every hospital its fingerprint another way than the bundle, for silofl join --signed-by:"
    )
    print(fingerprint(public))


def remove_silo_command(args: argparse.Namespace) -> None:
    from server.deploy import bundle
    from server.deploy.control import Control, read_connection

    federation = federation_of(args.federation)
    with Control(read_connection(federation.name)) as control:
        left = bundle.remove_silo(federation, control, args.name)
    print(f"{args.name} is shut out")
    if left:
        print(left, file=sys.stderr)


def withdraw_command(args: argparse.Namespace) -> None:
    from server.run.withdrawal import withdraw

    print("\n".join(withdraw(args.name, args.runs)))
    print(f"what others averaged stays; `silofl remove-silo {args.name}` shuts it out")


def doctor(args: argparse.Namespace) -> None:
    what = args.what
    if what is None and not os.environ.get("SILOFL_SERVER"):
        what = FEDERATION
        if not what.exists():
            raise UserError(
                f"there is no {what} here: name the server's; at a hospital: BUNDLE --data FILE"
            )
    if what is not None and what.suffix in (".yaml", ".yml"):
        from server.deploy.doctor import server_checks
        from server.deploy.federation import read_federation

        federation = read_federation(what, check_data=False)
        subject = federation.name
        checks = server_checks(federation, federation.name)
    else:
        echo = partial(print, file=sys.stderr if args.json else sys.stdout)
        subject, checks = site_doctor(args, echo)
    print_checks(checks, as_json=args.json)
    failed = [check.name for check in checks if not check.ok]
    if failed:
        raise UserError(
            f"{subject}: {len(failed)} of {len(checks)} checks failed: {', '.join(failed)}"
        )


COMMANDS = (
    Command(
        "compose",
        "write the compose file of a federation",
        compose,
        (FILE, file_option("--out", "FILE", "where to write it (default: standard output)")),
        examples=("silofl compose federation.yaml --out docker-compose.yml",),
        description="Write the compose file of a federation: one container per silo and a server, with TLS and keys.",
    ),
    Command(
        "credentials",
        "make missing keys and certificates, and write the flwr connection",
        credentials,
        (FILE,),
        examples=("silofl credentials federation.yaml",),
        description="With the containers of docker-compose.yml: fetch the CA's certificate from the server and"
        " write the flwr connection named after the federation. Without: make the CA, certificates"
        " and keys that are missing, for silofl up. What is there is kept.",
    ),
    Command(
        "add-silo",
        "make the bundle of one more hospital",
        add_silo_command,
        (
            option(
                "name",
                "NAME",
                "the silo's name (default: the request's)",
                nargs="?",
                default="",
            ),
            file_option("--request", "FILE", "what `silofl request` made at the hospital"),
            file_option("--out", "FILE", "the bundle to write (default: NAME.tar)"),
            option("--device", "DEVICE", "cpu or cuda:N, at the hospital", default="cpu"),
            option("--image", "IMAGE", "image that the hospital takes", default=""),
            SIGN_WITH,
            WHOSE,
        ),
        examples=("silofl add-silo --request north.request --out north.tar",),
        description="Register one more silo and write its bundle NAME.tar (mode 0600): the CA's certificate, a"
        " compose file, the server's address and the apps it may run. With --request the hospital "
        "has made its key itself, and its name stands in the request; without, the key is made "
        "here and in the bundle: for machines of one's own. The other silos need no change.",
    ),
    Command(
        "signing-key",
        "make the consortium's key that signs bundles, and print its fingerprint",
        signing_key,
        (
            FILE,
            file_option(
                "--out", "FILE", "another place for it, such as a stick: see --sign-with"
            ),
        ),
        examples=("silofl signing-key federation.yaml",),
        description="Make the key that signs bundles, unless it is there, and its public half beside it, and "
        "print the fingerprint, which hospitals are to get another way than the bundle. From then "
        "on silofl add-silo signs.",
    ),
    Command(
        "remove-silo",
        "shut a silo out at once",
        remove_silo_command,
        (option("name", "NAME", "the silo's name"), WHOSE),
        examples=("silofl remove-silo north",),
        description="Unregister a silo: the server refuses its key from its next call on.",
    ),
    Command(
        "withdraw",
        "delete what runs keep of a hospital",
        withdraw_command,
        (
            option("name", "NAME", "the silo's name"),
            file_option("runs", "RUN", "run directories (default: all below runs/)", nargs="*"),
        ),
        examples=("silofl withdraw north runs/first",),
        description="A hospital withdraws: its models, metrics and data summary leave the checkpoints, "
        "histories and summaries of these runs. What was averaged stays. Such a run cannot be "
        "resumed. silofl remove-silo shuts the hospital out.",
    ),
    Command(
        "doctor",
        "check a site, or the server, and print what to fix",
        doctor,
        (
            file_option(
                "what",
                "BUNDLE|FEDERATION.yaml",
                "a site's bundle, or a federation's file for its server (default: in a silo's container that silo, "
                f"else {FEDERATION})",
                nargs="?",
            ),
            file_option(
                "--data",
                "FILE|MODULE:FUNCTION",
                "the site's data file, or data set of its own code",
            ),
            file_option("--policy", "FILE", "the site's policy.toml (default: the bundle's)"),
            *AT_SITE,
            flag("--json", "as a JSON list of {check, ok, detail, fix}"),
        ),
        examples=("silofl doctor federation.yaml", "silofl doctor north.tar --data ours.npz"),
        description="A site: name, port, proxy, certificate, key, versions, clock, data, state, GPU, policy. A "
        "server: ports, certificates, who is registered, who is online. Exit code 0, or 2 where "
        "something fails.",
    ),
)
