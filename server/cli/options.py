"""Options that several commands have, and the settings of a run that they make."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from client.commands.table import OneOf, file_option, option, pairs
from client.protocol.methods import DEFAULTS, METHODS
from partitions.common.errors import UserError

if TYPE_CHECKING:
    from partitions.simulated import DatasetSource
    from server.deploy.federation import Federation

FEDERATION = Path("federation.yaml")
FILE = file_option(
    "file", "FEDERATION.yaml", "which silos, devices and data", nargs="?", default=FEDERATION
)
# Of a command that needs the file, and of one that needs a federation that is up
WHOSE = option(
    "--federation",
    "NAME|FEDERATION.yaml",
    "a federation, by its file or its name",
    default=str(FEDERATION),
)
WHICH = option(
    "--federation",
    "NAME|FEDERATION.yaml",
    "a federation, by its name or its file (default: the one that is up)",
    default="",
)
SIGN_WITH = file_option(
    "--sign-with", "FILE", "the signing key (default: of silofl signing-key)"
)
OF_SEVERAL = (
    option("--strategy", "A", "which method, where the run has several"),
    option("--seed", "S", "which seed, where the run has several", type=int),
)
TOKEN_FILE = file_option(
    "--token-file",
    "FILE",
    "file with the token that a client needs; made if it is missing. The token in it is not printed. "
    "Without it, beyond loopback, a new token is printed",
)
HOST = option(
    "--host", "ADDRESS", "another address than loopback's needs a token", default="127.0.0.1"
)
SPLIT_OPTIONS = (
    option("--data-dir", "DIR", "where data sets lie or are downloaded to"),
    option("--partition", "P", "how the data are split over the silos"),
    option("--silos", "N", "number of silos"),
)

RUN_OPTIONS = (
    option("--strategy", "A[,B...]", "method, or several for a study"),
    option("--rounds", "R", "communication rounds"),
    option("--seed", "S[,S...]", "seed, or several for a study"),
    pairs(
        "--set", "KEY=VALUE", "any other setting, for example learning-rate=0.01 apple.mu=0.1"
    ),
    option(
        "--config",
        "FILE.toml",
        "settings from a file; options on the command line go before it",
    ),
    option("--out", "DIR", "run directory (default: runs/TIME-STRATEGY)"),
)
STUDY = file_option(
    "--study",
    "FILE",
    "the study that the run belongs to; its [analysis] is what the report tests",
)

DATA_OPTIONS = (
    OneOf(
        (
            option("--dataset", "D", "data set by name"),
            option(
                "--data",
                "FILE|FOLDER|MODULE:FUNCTION",
                "one .npz file, split over the silos; a folder with an .npz file for each hospital; or a csv, "
                "with --recipe and --by; or a data set of your own",
            ),
        )
    ),
    option("--recipe", "FILE", "a csv: its recipe, from silofl import"),
    option("--by", "COLUMN", "a csv: a hospital for each value of this column"),
    option(
        "--subsample", "N", "at most N samples of the data set, drawn by seed: for a first try"
    ),
    *SPLIT_OPTIONS,
)


def is_federation_file(named: str) -> bool:
    return named.endswith((".yaml", ".yml"))


def federation_of(named: str) -> Federation:
    """Return the federation in a file, or of a name that is up from this machine. Raises UserError."""
    from server.deploy.federation import read_federation
    from server.deploy.local.record import find_federation

    if not is_federation_file(named):
        if (up := find_federation(named)) is None:
            raise UserError(f"--federation {named}: none of that name is up; name its file")
        named = up.file
    return read_federation(Path(named), check_data=False)


def connection_of(named: str) -> str:
    """Return the `flwr` connection of a federation, which has its name; empty for the one that is up."""
    return federation_of(named).name if is_federation_file(named) else named


def assignments(pairs: list[str]) -> dict[str, object]:
    """Return ``KEY=VALUE`` pairs as settings; values stay text and are converted later by the setting's type."""
    values: dict[str, object] = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not sign or not key:
            raise UserError(
                f"--set {pair}: KEY=VALUE is needed here, for example learning-rate=0.01"
            )
        values[key] = value
    return values


def run_values(args: argparse.Namespace) -> dict[str, object]:
    """Return the settings of a command line; --set overrides the file, and named options override both."""
    from partitions.common.names import split_names
    from server.results.run_directory import read_toml

    values: dict[str, object] = (
        dict(read_toml(Path(args.config))) if getattr(args, "config", None) else {}
    )
    values |= assignments(args.set)
    named = ("strategy", "rounds", "seed", "dataset", "data_dir", "partition", "silos", "out")
    values |= {
        n.replace("_", "-"): getattr(args, n)
        for n in named
        if getattr(args, n, None) is not None
    }
    methods = split_names(values.get("strategy", DEFAULTS["strategy"]))
    for key in sorted(DEFAULTS.keys() & assignments(args.set)):
        method = key.partition(".")[0]
        if method in METHODS and method not in methods and "adds" not in METHODS[method]:
            print(f"note: {key} has no effect: no run is of {method}", file=sys.stderr)
    values |= own_data(args, values)
    for key in ("data-dir", "init-weights"):
        if values.get(key):
            values[key] = absolute_path(str(values[key]))
    return values


def study_values(args: argparse.Namespace) -> tuple[str, dict[str, object]]:
    """Return the text of --study and the setting that names it; both empty without. Raises DataError, SiteError."""
    if args.study is None:
        return "", {}
    from client.studies import read_study

    text, study = read_study(args.study)
    return text, {"study": study.name}


def own_data(args: argparse.Namespace, values: Mapping[str, object]) -> dict[str, object]:
    """Return the settings for --data, --recipe, --by and --subsample, with absolute paths. Raises UserError."""
    from urllib.parse import urlencode

    from partitions.own.dataset import resolve_name
    from partitions.simulated import OPTIONS, hospitals_of, parse_source

    data = getattr(args, "data", None) or ""
    chosen = {key: value for key in OPTIONS if (value := getattr(args, key, None))}
    if not (data or chosen or "dataset" in values):
        return {}
    source = parse_source(str(data or values.get("dataset", "digits")))
    function = resolve_name(source.name)
    is_file = source.name.endswith((".npz", ".csv")) or Path(source.name).is_dir()
    if data and not (is_file or function):
        raise UserError(
            f"--data {data}: is no folder, no .npz file (silofl import makes one), no csv, and no MODULE:FUNCTION"
        )
    if data and getattr(args, "data_dir", None):
        raise UserError("--data-dir goes with --dataset: --data names its own file or folder")
    if "recipe" in chosen:
        chosen["recipe"] = absolute_path(chosen["recipe"])
    name = function or (absolute_path(source.name) if data or source.is_path else source.name)
    options = urlencode(
        {key: value for key in OPTIONS if (value := chosen.get(key) or getattr(source, key))}
    )
    dataset = parse_source(f"{name}#{options}" if options else name)
    if name.endswith(".csv") and not dataset.by:
        raise UserError(
            f"--data {source.name}: a csv needs --recipe FILE.recipe.toml and --by COLUMN"
        )
    hospitals = hospitals_of(dataset) or centres_of(dataset, values)
    natural = {"partition": "natural", "silos": str(len(hospitals))} if hospitals else {}
    return {
        "dataset": str(dataset),
        **{key: value for key, value in natural.items() if key not in values},
    }


def centres_of(source: DatasetSource, values: Mapping[str, object]) -> list[str]:
    """Return the silos that a named data set comes with; empty unless the partition is `natural`."""
    from partitions.simulated import open_dataset

    if values.get("partition") != "natural" or source.is_path:
        return []
    named = {key: str(values.get(key) or "") for key in ("data-dir", "seed", "task")}
    seed = int(named["seed"].partition(",")[0] or 0)
    whole = open_dataset(str(source), named["data-dir"], seed, named["task"] or "auto")
    return list(whole.groups or ())


def absolute_path(path: str) -> str:
    """Return the absolute path; "" stays "". A run's config.toml must name the same files in any directory."""
    return str(Path(path).expanduser().resolve()) if path else ""
