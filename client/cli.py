"""Commands of the hospital: ``check-data``, ``import``, ``join``, ``predict``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_commands(commands: Any) -> None:
    """Add this group to ``silofl``."""
    p = commands.add_parser("check-data", help="check a silo's data file before joining")
    p.add_argument("file", metavar="FILE", help="the .npz file")
    p.set_defaults(run=check_data)

    p = commands.add_parser("import", help="make a silo's data file from pictures or a table")
    p.add_argument("source", metavar="SOURCE", help="a folder of pictures, or a csv table")
    p.add_argument("--out", metavar="FILE.npz", required=True, help="the file to write")
    p.add_argument("--label", metavar="COLUMN", help="the label's column (default: label, or the last one)")
    p.add_argument("--labels", metavar="A,B...", help="all classes in order, the same in every hospital")
    p.add_argument("--size", metavar="PIXELS", type=int, help="resize pictures to PIXELS x PIXELS")
    p.add_argument("--seed", metavar="S", type=int, default=42, help="seed of the split (default: 42)")
    p.set_defaults(run=import_data)

    p = commands.add_parser(
        "join",
        help="take part as the silo of a bundle, without Docker",
        description="Check data, address, certificate and key, then take part until Ctrl-C. In containers: unpack "
        "the bundle and read its README.md.",
    )
    p.add_argument("bundle", metavar="BUNDLE", type=Path, help="NAME.tar from silofl add-silo, or its folder")
    p.add_argument("--data", metavar="FILE", type=Path, required=True, help="this hospital's .npz file")
    p.add_argument("--device", metavar="DEVICE", default="", help="cpu or cuda:N (default: the bundle's)")
    p.set_defaults(run=join)

    p = commands.add_parser("predict", help="apply an exported model to a data file")
    p.add_argument("--model", metavar="FILE", required=True, help="a model from silofl export")
    p.add_argument("--data", metavar="FILE", required=True, help="an .npz file; its test part, or all of x")
    p.add_argument(
        "--out", metavar="CSV", help="where to write index,label,p_0,... (default: standard output)"
    )
    p.set_defaults(run=predict)


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

    labels = [name.strip() for name in given.labels.split(",")] if given.labels else []
    print(
        import_source(
            given.source, given.out, size=given.size, label=given.label, labels=labels, seed=given.seed
        )
    )
    print(given.out)


def join(given: argparse.Namespace) -> int:
    from client.bundle import join as take_part

    return take_part(given.bundle, given.data, device=given.device, say=lambda line: print(line, flush=True))


def predict(given: argparse.Namespace) -> None:
    from client.export import predict_file

    text = predict_file(Path(given.model), Path(given.data))
    if given.out:
        Path(given.out).write_text(text)
        print(given.out)
    else:
        print(text, end="")
