"""Commands of the hospital: ``check-data``, ``import``, ``request``, ``check-bundle``, ``join``, ``policy``, ``audit``,
``predict``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partitions.common.errors import UserError

if TYPE_CHECKING:
    from partitions.schema import Schema


def add_commands(commands: Any) -> None:
    """Add this group to ``silofl``."""
    add_check_data(commands)
    add_import(commands)
    add_request(commands)
    add_check_bundle(commands)
    add_join(commands)
    add_policy(commands)
    add_audit(commands)
    add_predict(commands)


def add_check_data(commands: Any) -> None:
    """``check-data``."""
    p = commands.add_parser("check-data", help="check a silo's data file before joining")
    p.add_argument("file", metavar="FILE", help="the .npz file")
    p.add_argument(
        "--schema",
        metavar="BUNDLE|FOLDER|FILE",
        type=Path,
        help="check it against the federation's schema: a bundle, its folder, or a .toml, .yaml or .json file",
    )
    p.set_defaults(run=check_data)


def add_import(commands: Any) -> None:
    """``import``."""
    p = commands.add_parser(
        "import",
        help="make a silo's data file from pictures, scans or a table",
        description="Read a folder of pictures or of DICOM files, a csv that names pictures, DICOM or NIfTI files, or "
        "a table, and write one data file. Nothing of a scan's header is written or shown; one that cannot be read is "
        "called by its place among all files of the folder: find SOURCE -xtype f | LC_ALL=C sort | sed -n 17p",
    )
    p.add_argument("source", metavar="SOURCE", help="a folder, or a csv")
    p.add_argument("--out", metavar="FILE.npz", required=True, help="the file to write")
    p.add_argument(
        "--label", metavar="COLUMN", help="a csv: the label's column, or several: A,B (default: the column label)"
    )
    patient = p.add_mutually_exclusive_group()
    patient.add_argument(
        "--patient",
        metavar="COLUMN",
        default="",
        help="the column that says whose a sample is (default: patient), or folder: folders below those of the "
        "classes; a patient's samples go to one part, and the file has numbers, not names",
    )
    patient.add_argument(
        "--no-patient", action="store_true", help="no column tells patients apart: each row is of another"
    )
    p.add_argument("--time", metavar="COLUMN", help="survival: the column of times ...")
    p.add_argument("--event", metavar="COLUMN", help="... and that of events, 1 or 0 (censored)")
    p.add_argument(
        "--task", metavar="TASK", default="auto", help="what there is to learn, where the labels do not tell"
    )
    p.add_argument("--labels", metavar="A,B...", help="all classes in order, the same in every hospital")
    p.add_argument(
        "--labels-from",
        metavar="FILE.csv",
        help="DICOM: a csv with labels and a column study (StudyInstanceUID), accession (AccessionNumber) or patient "
        "(PatientID); default: the csv in the folder",
    )
    add_scan_options(p)
    add_table_options(p)
    p.add_argument("--seed", metavar="S", type=int, default=42, help="seed of the split (default: 42)")
    p.add_argument("--overwrite", action="store_true", help="replace FILE.npz, and with it who is for testing")
    p.set_defaults(run=import_data)


def add_scan_options(p: argparse.ArgumentParser) -> None:
    """Options of ``import`` for pictures and scans."""
    p.add_argument("--size", metavar="PIXELS", type=int, help="resize pictures to PIXELS x PIXELS")
    p.add_argument(
        "--window",
        metavar="CENTRE,WIDTH",
        help="scans: from CENTRE - WIDTH/2, black, to CENTRE + WIDTH/2, white, in Hounsfield units of a CT; "
        "--window=-600,1500 (default: the file's own)",
    )
    p.add_argument(
        "--spacing", metavar="MM", type=float, help="scans: a pixel is MM wide and high; --size then cuts, or widens"
    )
    p.add_argument("--slices", metavar="N", type=int, default=1, help="scans: slices of each volume (default: 1)")
    p.add_argument(
        "--series",
        metavar="PATTERN",
        default="",
        help="DICOM: part of a series' description, or with * and ? all of it",
    )


def add_table_options(p: argparse.ArgumentParser) -> None:
    """Options of ``import`` for tables and texts."""
    p.add_argument("--text", metavar="COLUMN", default="", help="a csv: the column of texts, which become tokens")
    p.add_argument(
        "--vocabulary",
        metavar="hashed:N|FILE",
        help="texts: hash words into N numbers, or a file of one word per line, or BERT's vocab.txt; the same in every "
        "hospital (default: hashed:65536)",
    )
    p.add_argument("--length", metavar="N", type=int, help="texts: tokens that are kept of each (default: 200)")
    p.add_argument("--columns", metavar="A,B...", help="a csv: these columns of numbers (default: all; of texts: none)")
    p.add_argument("--separator", metavar="SIGN", default="", help="a csv: ',', ';', '|' or tab (default: by line 1)")
    p.add_argument("--decimal", metavar="SIGN", default=".", help="a csv: , where 1,5 is a number (default: .)")


def add_request(commands: Any) -> None:
    """``request``."""
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
    """``check-bundle``."""
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
    """``join``."""
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
    """``policy``."""
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
    """``audit``."""
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


def add_predict(commands: Any) -> None:
    """``predict``."""
    p = commands.add_parser("predict", help="apply an exported model to a data file")
    p.add_argument("--model", metavar="FILE", required=True, help="a model from silofl export")
    p.add_argument("--data", metavar="FILE", required=True, help="an .npz file; its test part, or all of x")
    p.add_argument("--out", metavar="CSV", help="where to write index,label,p_0,... (default: standard output)")
    p.add_argument("--masks", metavar="FILE.npz", help="of a model of outlines: where to write the masks")
    p.set_defaults(run=predict)


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
    from partitions.silo_file import check_silo_file

    checks = check_silo_file(args.file, agreed=schema_at(args.schema) if args.schema else None)
    for check in checks:
        print(f"{'ok  ' if check.ok else 'FAIL'}  {check.name}: {check.detail}")
    bad = next((check for check in checks if not check.ok), None)
    if bad:
        raise UserError(f"{args.file}: {bad.detail}; {bad.fix}")


def schema_at(where: Path) -> Schema:
    """The schema of a bundle, its folder, or a file. Raises UserError where there is none."""
    from client.site.trust.bundle import read_bundle
    from partitions.schema import load_schema, read_schema

    if where.suffix in (".toml", ".yaml", ".yml", ".json"):
        return load_schema(where)
    text = read_bundle(where).get("schema.json")
    if text is None:
        raise UserError(f"{where} has no schema: its federation declares none")
    return read_schema(text.decode(errors="replace"))


def import_data(args: argparse.Namespace) -> None:
    from partitions.common.names import unknown_name
    from partitions.importing.notes import ALL_COLUMNS, Take
    from partitions.importing.options import ImportOptions
    from partitions.importing.source import import_source
    from partitions.importing.tables import SEPARATORS
    from partitions.labels import TASKS

    labels = [name.strip() for name in args.labels.split(",")] if args.labels else []
    if args.task not in ("auto", *TASKS):
        raise unknown_name("task", args.task, TASKS)
    if bool(args.time) != bool(args.event) or (args.time and args.label):
        raise UserError("survival needs --time and --event, and no --label")
    if not args.text and (args.vocabulary is not None or args.length is not None):
        raise UserError("--vocabulary and --length are of texts: name their column with --text")
    take = Take(
        text=args.text,
        columns=tuple(name.strip() for name in (args.columns or "").split(",") if name.strip()),
        vocabulary=ALL_COLUMNS.vocabulary if args.vocabulary is None else args.vocabulary,
        length=ALL_COLUMNS.length if args.length is None else args.length,
        patient=None if args.no_patient else args.patient,
        separator=SEPARATORS.get(args.separator, args.separator),
        decimal=args.decimal,
    )
    made = import_source(
        args.source,
        args.out,
        ImportOptions(
            size=args.size,
            label=args.label,
            labels=labels,
            labels_from=args.labels_from,
            seed=args.seed,
            survival=(args.time, args.event) if args.time else None,
            task=args.task,
            window=parse_window(args.window) if args.window else None,
            spacing=args.spacing,
            slices=args.slices,
            series=args.series,
            take=take,
            overwrite=args.overwrite,
        ),
    )
    print(made)
    for note in made.notes:
        print(f"note: {note}")
    print("the split is written into the file: no run can change it")
    print(args.out)


def parse_window(text: str) -> tuple[float, float]:
    """CENTRE,WIDTH as two numbers."""
    from partitions.importing.tables import is_number

    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 2 or not all(map(is_number, parts)):
        raise UserError(f"--window is {text[:40]!r}; it is a centre and a width, for example --window=40,400")
    return float(parts[0]), float(parts[1])


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
        text, faults = read(args.where, args.month, args.seen, args.first, args.receipts)
        print(text)
    if faults:
        raise UserError(f"the audit log is not whole, {len(faults)} faults: {faults[0]}")


def predict(args: argparse.Namespace) -> None:
    from client.export import predict_file

    text = predict_file(Path(args.model), Path(args.data), Path(args.masks) if args.masks else None)
    if args.out:
        Path(args.out).write_text(text)
        print(args.out)
    else:
        print(text, end="")
