"""Commands of the researcher: ``strategies``, ``simulate``, ``report``, ``partition``, ``evaluate``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from partitions.common.errors import UserError

# Each command imports its modules when it runs: importing PyTorch and Flower takes seconds, too long for `--help`.


def add_commands(commands: Any) -> None:
    """Add the commands of this group to the parser."""
    add_strategies(commands)
    add_simulate(commands)
    add_report(commands)
    add_partition(commands)
    add_evaluate(commands)


def add_strategies(commands: Any) -> None:
    """Add the command ``strategies``."""
    p = commands.add_parser("strategies", help="list the methods")
    p.add_argument("--json", action="store_true", help="as JSON, with their settings")
    p.set_defaults(run=list_strategies)


def add_simulate(commands: Any) -> None:
    """Add the command ``simulate``."""
    p = commands.add_parser(
        "simulate",
        help="run methods in this process",
        description="Run one method, or a study of several methods and seeds, on this machine, or with "
        "--workers ray on a cluster. The last line printed is the run directory.",
    )
    add_run_options(p)
    add_data_options(p)
    p.add_argument(
        "--log",
        metavar="LIBRARY",
        action="append",
        default=[],
        help="also log to tensorboard or mlflow, below the run directory; may be repeated",
    )
    p.add_argument(
        "--workers",
        metavar="N",
        default="1",
        help="runs of a study that go on side by side, each in a process of its own, or ray: as many as Ray has room "
        "for; the numbers are the same (default: 1)",
    )
    p.add_argument(
        "--hold-out",
        metavar="NAME[,NAME]|each",
        help="also train without these hospitals, or once without each, and evaluate there what a newcomer gets",
    )
    p.add_argument(
        "--tuned",
        metavar="DIR",
        nargs="+",
        type=Path,
        default=[],
        help="directories of silofl tune: run each method with its best settings; several differ in their seed alone",
    )
    p.set_defaults(run=simulate)


def add_data_options(p: argparse.ArgumentParser) -> None:
    """Add the data options of ``simulate`` and ``tune``."""
    data = p.add_mutually_exclusive_group()
    data.add_argument("--dataset", metavar="D", help="data set by name")
    data.add_argument(
        "--data",
        metavar="FILE|FOLDER",
        help="one .npz file, split over the silos; a folder with an .npz file for each hospital; or a csv, with "
        "--recipe and --by",
    )
    p.add_argument("--recipe", metavar="FILE", help="a csv: its recipe, from silofl import")
    p.add_argument("--by", metavar="COLUMN", help="a csv: a hospital for each value of this column")
    p.add_argument("--subsample", metavar="N", help="at most N samples of the data set, drawn by seed: for a first try")
    p.add_argument("--data-dir", metavar="DIR", help="where data sets lie or are downloaded to")
    p.add_argument("--partition", metavar="P", help="how the data are split over the silos")
    p.add_argument("--silos", metavar="N", help="number of silos")


def add_report(commands: Any) -> None:
    """Add the command ``report``."""
    p = commands.add_parser("report", help="make a run's report.html anew")
    p.add_argument("directory", metavar="RUN", help="a run directory")
    p.set_defaults(run=report)


def add_partition(commands: Any) -> None:
    """Add the command ``partition``."""
    p = commands.add_parser("partition", help="split a data set into one file per silo")
    p.add_argument(
        "--dataset", metavar="D", default="digits", help="data set by name, or an .npz file (default: digits)"
    )
    p.add_argument("--data-dir", metavar="DIR", default="", help="where data sets lie or are downloaded to")
    p.add_argument("--partition", metavar="P", default="dirichlet", help="how to split (default: dirichlet)")
    p.add_argument("--silos", metavar="N", type=int, default=12, help="number of silos (default: 12)")
    p.add_argument("--seed", metavar="S", type=int, default=42, help="seed of the split (default: 42)")
    add_set(p, "a setting of the partition, for example dirichlet.beta=0.1, or validation=0.2")
    p.add_argument("--plot", metavar="FILE", help="also draw who holds what (.png or .svg)")
    p.add_argument("--out", metavar="DIR", required=True, help="directory for hospital-01.npz ... and manifest.json")
    p.set_defaults(run=partition)


def add_evaluate(commands: Any) -> None:
    """Add the command ``evaluate``."""
    p = commands.add_parser(
        "evaluate",
        help="metrics of a model, or of a run's models, at every silo, without training",
        description="Evaluate the shared model of a run, all its models, or an exported model, without training and "
        "without touching states. DIR/matrix.csv has a row for each model, silo, split and metric. A run is evaluated "
        "at the silos of its simulation, unless --data or --connection says where.",
    )
    p.add_argument(
        "source", metavar="RUN|MODEL.safetensors", help="a run directory, or an exported model with its card"
    )
    p.add_argument(
        "--models",
        choices=("shared", "all"),
        default="shared",
        help="of a run: the model that its silos share (the default), or also each silo's own that the report shows; "
        "one that never left its hospital has what the run measured there",
    )
    where = p.add_mutually_exclusive_group()
    where.add_argument("--data", metavar="FILE", help="at one silo's data file")
    where.add_argument("--connection", metavar="NAME", help="at the silos of a federation")
    p.add_argument("--strategy", metavar="A", help="which method, where the run has several")
    p.add_argument("--seed", metavar="S", type=int, help="which seed, where the run has several")
    p.add_argument("--study", metavar="NAME", default="", help="--connection: the study that the hospitals approved")
    p.add_argument("--out", metavar="DIR", required=True, help="a new directory for matrix.csv and the models")
    p.set_defaults(run=evaluate)


def add_run_options(p: argparse.ArgumentParser) -> None:
    """Add the options of ``simulate`` and ``run``."""
    p.add_argument("--strategy", metavar="A[,B...]", help="method, or several for a study")
    p.add_argument("--rounds", metavar="R", help="communication rounds")
    p.add_argument("--seed", metavar="S[,S...]", help="seed, or several for a study")
    add_set(p, "any other setting, for example learning-rate=0.01 apple.mu=0.1")
    p.add_argument(
        "--config", metavar="FILE.toml", help="settings from a file; options on the command line go before it"
    )
    p.add_argument("--out", metavar="DIR", help="run directory (default: runs/TIME-STRATEGY)")


def add_set(p: argparse.ArgumentParser, help: str) -> None:
    """Add ``--set``, whose pairs :func:`assignments` reads."""
    p.add_argument("--set", metavar="KEY=VALUE", nargs="+", action="extend", default=[], help=help)


def assignments(pairs: list[str]) -> dict[str, object]:
    """Return ``KEY=VALUE`` pairs as settings; values stay text and are converted later by the setting's type."""
    values: dict[str, object] = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not sign or not key:
            raise UserError(f"--set {pair}: KEY=VALUE is needed here, for example learning-rate=0.01")
        values[key] = value
    return values


def run_values(args: argparse.Namespace) -> dict[str, object]:
    """Return the settings of a command line; --set overrides the file, and named options override both."""
    from server.results.run_directory import read_toml

    values: dict[str, object] = dict(read_toml(Path(args.config))) if args.config else {}
    values |= assignments(args.set)
    named = ("strategy", "rounds", "seed", "dataset", "data_dir", "partition", "silos", "out")
    values |= {n.replace("_", "-"): getattr(args, n) for n in named if getattr(args, n, None) is not None}
    values |= own_data(args, values)
    for key in ("data-dir", "init-weights"):
        if values.get(key):
            values[key] = absolute(str(values[key]))
    return values


def own_data(args: argparse.Namespace, values: Mapping[str, object]) -> dict[str, object]:
    """Return the settings for --data, --recipe, --by and --subsample, with absolute paths. Raises UserError."""
    from partitions.own_files import Source, hospitals_of, parse_source

    given, recipe, by = (getattr(args, key, None) or "" for key in ("data", "recipe", "by"))
    count = getattr(args, "subsample", None)
    if not (given or recipe or by or count or "dataset" in values):
        return {}
    source = parse_source(str(given or values.get("dataset", "digits")))
    if given and not (source.name.endswith((".npz", ".csv")) or Path(source.name).is_dir()):
        raise UserError(f"--data {given}: is no folder, no .npz file (silofl import makes one) and no csv")
    is_csv = source.name.endswith(".csv")
    if given and getattr(args, "data_dir", None):
        raise UserError("--data-dir goes with --dataset: --data names its own file or folder")
    if (recipe or by) and not is_csv:
        raise UserError("--recipe and --by go with --data FILE.csv")
    recipe, by = recipe or source.recipe, by or source.by
    if is_csv and not (recipe and by):
        raise UserError(f"--data {source.name}: a csv needs --recipe FILE.recipe.toml and --by COLUMN")
    if count is not None and not (count.isascii() and count.isdigit() and int(count)):
        raise UserError(f"--subsample {count[:20]}: a number of samples, 1 or more, is needed here")
    name = absolute(source.name) if given or source.is_path else source.name
    made = Source(name, absolute(recipe), by, int(count) if count else source.subsample)
    hospitals = hospitals_of(made)
    own = {"partition": "natural", "silos": str(len(hospitals))} if hospitals else {}
    return {"dataset": str(made), **{key: value for key, value in own.items() if key not in values}}


def absolute(path: str) -> str:
    """Return the absolute path; "" stays "". A run's config.toml must name the same files in any directory."""
    return str(Path(path).expanduser().resolve()) if path else ""


LEGEND = """\
down, up: the numbers that a silo receives and sends in a round. Σ: of the whole model; Σ_s: of its shared layers;
Σ_bn: of its batch normalisation; C: classes; K: inputs of the last layer; M: other silos' models; d, p: settings.
reports: whose scores the report has: of the model that a silo received, or of its own, the personal one.
"""


def list_strategies(args: argparse.Namespace) -> None:
    from strategies import strategies
    from strategies.base.settings import keys_of

    rows = [
        {
            "name": name,
            "title": s.info.title,
            "paper": s.info.paper,
            "sends": {"down": s.info.sends[0], "up": s.info.sends[1]},
            "reports": s.info.reports,
            "settings": {
                key: {"default": f.default, "symbol": f.metadata["symbol"], "type": type(f.default).__name__}
                for key, f in keys_of(s.Settings, name).items()
            },
        }
        for name, s in strategies().items()
    ]
    if args.json:
        print(json.dumps(rows, indent=1, ensure_ascii=False))
        return
    print(LEGEND)
    for name, s in strategies().items():
        i = s.info
        print(f"{name:18}{i.title} ({i.paper}); down {i.sends[0]}, up {i.sends[1]}, reports {i.reports}")
        for key, f in keys_of(s.Settings, name).items():
            symbol = f"{f.metadata['symbol']}, " if f.metadata["symbol"] else ""
            print(f"    {key} = {f.default!r}  ({symbol}{f.metadata['help']})")


def simulate(args: argparse.Namespace) -> None:
    from server.simulation.simulate import simulate
    from server.simulation.workers import executor_of

    executor = executor_of(args.workers)
    out = simulate(run_values(args), log=args.log, executor=executor, hold_out=args.hold_out, tuned=args.tuned)
    print_outcomes(out)
    print(out)


def print_outcomes(out: Path) -> None:
    """Print one line for each run of a finished study."""
    for run in json.loads((out / "summary.json").read_text())["runs"]:
        print(f"{run['strategy']}-{run['seed']}: {outcome(run)}")


def report(args: argparse.Namespace) -> None:
    from server.report.write import write_report

    print(write_report(Path(args.directory)))


def outcome(run: dict[str, Any]) -> str:
    """Return a run's result in one line."""
    from server.results.summary import early_stop, round_name

    final = run["final"]
    score = run.get("score", "accuracy")  # missing in a run of an earlier version
    if final[f"{score}_mean"] is None:
        return f"{run['rounds']} rounds, nothing evaluated"
    when = round_name(final["round"], run["rounds"])
    when = when if when.startswith("after") else f"at {when}"
    return (
        f"{score} {final[f'{score}_mean']:.4f}, the mean of {len(run['silos'])} silos' test parts "
        f"{when} ({run['reports']} model; best of all rounds {run['bmcta']:.4f})"
        + (f"; {why}" if (why := early_stop(run)) else "")
    )


def partition(args: argparse.Namespace) -> None:
    from partitions.manifest import check_plot, plot_partition, write_partition
    from partitions.simulated import open_dataset
    from strategies.base.run_settings import parse_settings

    values = assignments(args.set)
    named = ("dataset", "data_dir", "partition", "silos", "seed")
    settings = parse_settings({**values, **{n.replace("_", "-"): getattr(args, n) for n in named}})
    c = settings.common
    if args.plot:
        check_plot(args.plot)
    dataset = open_dataset(c.dataset, c.data_dir, c.seed, c.task)
    manifest = write_partition(
        dataset,
        c.partition,
        Path(args.out),
        silos=c.silos,
        seed=c.seed,
        settings=settings.partition,
        validation=c.validation,
    )
    for silo in manifest["silos"]:
        print(f"{silo['name']}: {silo['n_train']} train, {silo['n_val']} val, {silo['n_test']} test")
    if args.plot:
        plot_partition(manifest, Path(args.plot))
    print(args.out)


def evaluate(args: argparse.Namespace) -> None:
    from server.simulation.evaluate import evaluate, evaluate_deployed

    source, out = Path(args.source), Path(args.out)
    if args.study and not args.connection:
        raise UserError("--study goes with --connection: hospitals approve studies")
    if args.connection:
        matrix = evaluate_deployed(source, out, args.connection, args.models, args.strategy, args.seed, args.study)
    else:
        data = Path(args.data) if args.data else None
        matrix = evaluate(source, out, args.models, data, args.strategy, args.seed)
    print(matrix)
