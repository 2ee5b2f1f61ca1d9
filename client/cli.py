"""Commands of the hospital: ``check-data``, ``import``, ``request``, ``check-bundle``, ``join``, ``policy``, ``audit``,
``predict``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_commands(commands: Any) -> None:
    """Add this group to ``silofl``."""
    p = commands.add_parser("check-data", help="check a silo's data file before joining")
    p.add_argument("file", metavar="FILE", help="the .npz file")
    p.set_defaults(run=check_data)

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
        "--label", metavar="COLUMN", help="the label's column, or several: A,B (default: label, or the last one)"
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
    p.add_argument("--text", metavar="COLUMN", default="", help="a csv: the column of texts, which become tokens")
    p.add_argument(
        "--vocabulary",
        metavar="hashed:N|FILE",
        help="texts: hash words into N numbers, or a file of one word per line, or BERT's vocab.txt; the same in every "
        "hospital (default: hashed:65536)",
    )
    p.add_argument("--length", metavar="N", type=int, help="texts: tokens that are kept of each (default: 200)")
    p.add_argument("--columns", metavar="A,B...", help="a csv: these columns of numbers (default: all; of texts: none)")
    p.add_argument("--seed", metavar="S", type=int, default=42, help="seed of the split (default: 42)")
    p.set_defaults(run=import_data)

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
    p.set_defaults(run=audit)

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


def check_data(given: argparse.Namespace) -> None:
    from partitions.silo_file import check_silo_file

    checks = check_silo_file(given.file)
    for check in checks:
        print(f"{'ok  ' if check.ok else 'FAIL'}  {check.name}: {check.detail}")
    bad = next((check for check in checks if not check.ok), None)
    if bad:
        raise ValueError(f"{given.file}: {bad.detail}; {bad.fix}")


def import_data(given: argparse.Namespace) -> None:
    from partitions.importing import import_source
    from partitions.labels import TASKS
    from partitions.names import unknown_name
    from partitions.notes import ALL_COLUMNS, Take

    labels = [name.strip() for name in given.labels.split(",")] if given.labels else []
    if given.task not in ("auto", *TASKS):
        raise unknown_name("task", given.task, TASKS)
    if bool(given.time) != bool(given.event) or (given.time and given.label):
        raise ValueError("survival needs --time and --event, and no --label")
    if not given.text and (given.vocabulary is not None or given.length is not None):
        raise ValueError("--vocabulary and --length are of texts: name their column with --text")
    take = Take(
        text=given.text,
        columns=tuple(name.strip() for name in (given.columns or "").split(",") if name.strip()),
        vocabulary=ALL_COLUMNS.vocabulary if given.vocabulary is None else given.vocabulary,
        length=ALL_COLUMNS.length if given.length is None else given.length,
    )
    made = import_source(
        given.source,
        given.out,
        size=given.size,
        label=given.label,
        labels=labels,
        labels_from=given.labels_from,
        seed=given.seed,
        survival=(given.time, given.event) if given.time else None,
        task=given.task,
        window=parse_window(given.window) if given.window else None,
        spacing=given.spacing,
        slices=given.slices,
        series=given.series,
        take=take,
    )
    print(made)
    for note in made.notes:
        print(f"note: {note}")
    print("the split is written into the file: no run can change it")
    print(given.out)


def parse_window(text: str) -> tuple[float, float]:
    """CENTRE,WIDTH as two numbers."""
    from partitions.tables import is_number

    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 2 or not all(map(is_number, parts)):
        raise ValueError(f"--window is {text[:40]!r}; it is a centre and a width, for example --window=40,400")
    return float(parts[0]), float(parts[1])


def request(given: argparse.Namespace) -> None:
    from client.site.request import make_request

    key, file, asked = make_request(given.name, given.folder, given.out)
    print(f"{key}: the private key of {asked.name}; it stays here, and is worth a backup")
    print(f"{file}: send it to the server's operator, and tell them the key's fingerprint another way, to compare:")
    print(asked.fingerprint)


def check_bundle(given: argparse.Namespace) -> None:
    from client.site.bundle import check

    check(given.bundle, given.signed_by, say=print)


def join(given: argparse.Namespace) -> int:
    from client.site.bundle import join as take_part

    return take_part(
        given.bundle,
        given.data,
        device=given.device,
        policy=given.policy,
        signed_by=given.signed_by,
        say=lambda line: print(line, flush=True),
    )


def policy(given: argparse.Namespace) -> None:
    from client.policies import policy_at, policy_page

    print(policy_page(policy_at(given.what)))


def audit(given: argparse.Namespace) -> None:
    from client.site.audit_page import audit as read

    text, faults = read(given.where, given.month, given.seen, given.first)
    print(text)
    if faults:
        raise ValueError(f"the audit log is not whole, {len(faults)} faults: {faults[0]}")


def predict(given: argparse.Namespace) -> None:
    from client.export import predict_file

    text = predict_file(Path(given.model), Path(given.data), Path(given.masks) if given.masks else None)
    if given.out:
        Path(given.out).write_text(text)
        print(given.out)
    else:
        print(text, end="")
