"""Commands of the researcher: ``strategies``, ``simulate``, ``report``, ``partition``, ``evaluate``."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from client.commands.table import (
    Command,
    OneOf,
    choice,
    file_option,
    flag,
    option,
    pairs,
    several,
)
from partitions.common.errors import UserError
from server.cli.options import (
    DATA_OPTIONS,
    OF_SEVERAL,
    RUN_OPTIONS,
    SPLIT_OPTIONS,
    STUDY,
    assignments,
    connection_of,
    run_values,
    study_values,
)

if TYPE_CHECKING:
    from server.results.history import Row

# Each command imports its modules when it runs: importing PyTorch and Flower takes seconds, too long for `--help`.


def list_strategies(args: argparse.Namespace) -> None:
    from partitions.common.settings import keys_of
    from server.rendering import fill
    from strategies import strategies

    if args.study or args.set or args.sums or args.dp:
        list_choices(args)
        return
    rows = [
        {
            "name": name,
            "title": s.info.title,
            "paper": s.info.paper,
            "sends": {"down": s.info.sends[0], "up": s.info.sends[1]},
            "reports": s.info.reports,
            "sums": bool(s.info.aggregation.sums),
            "not_sums": getattr(s.info.aggregation.sums, "otherwise", s.info.aggregation.sums),
            "settings": {
                key: {
                    "default": f.default,
                    "symbol": f.metadata["symbol"],
                    "type": type(f.default).__name__,
                }
                for key, f in keys_of(s.Settings, name).items()
            },
        }
        for name, s in strategies().items()
    ]
    if args.json:
        print(json.dumps(rows, indent=1))
        return
    methods = strategies()
    print(fill("cli/methods.txt", methods=methods, keys_of=keys_of, choices=None), end="")


def list_choices(args: argparse.Namespace) -> None:
    """Print the methods that can run in a study or with settings, and why the others cannot."""
    from client.studies import read_study
    from server.planning.choice import choices, choices_in
    from server.rendering import fill

    settings = assignments(args.set)
    settings |= {"secure-aggregation": True} if args.sums else {}
    settings |= {"dp": True} if args.dp else {}
    if args.study and settings:
        raise UserError(f"--for {args.study}: the study has the settings; leave out the others")
    rows = choices_in(read_study(args.study)[1]) if args.study else choices(settings)
    if args.json:
        print(json.dumps(rows, indent=1))
        return
    print(fill("cli/methods.txt", choices=rows), end="")


def simulate_command(args: argparse.Namespace) -> None:
    from server.simulation.simulate import simulate
    from server.simulation.workers import executor_of

    executor, (study, named) = executor_of(args.workers), study_values(args)
    out = simulate(
        {**run_values(args), **named},
        log=args.log,
        executor=executor,
        hold_out=args.hold_out,
        tuned=args.tuned,
        study=study,
    )
    print_outcomes(out)
    print(out)


def print_outcomes(out: Path) -> None:
    """Print one line for each run of a finished study."""
    from server.results.history import History
    from server.results.reading import read_summary, which_of

    history = History(out / "history.csv")
    for run in read_summary(out / "summary.json")["runs"]:
        rows = history.of(*which_of(run))
        print(f"{run['strategy']}-{run['seed']}: {outcome(run)}{note_untrained(run, rows)}")


def report(args: argparse.Namespace) -> None:
    from server.report.checklist import write_checklist
    from server.report.write import write_report

    print((write_checklist if args.checklist else write_report)(Path(args.directory)))


LEAST_LEARNED = 0.1  # a score that training raises by less is that of an untrained network


def note_untrained(run: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """Return a note on a run that hardly beats its network before training, or "". ``rows``: its history."""
    from server.results.summary import values_by_round

    score = run["score"]
    first = values_by_round(rows, "test", "received", score).get(1)
    final = run["final"][f"{score}_mean"]
    if (
        not first
        or final is None
        or final - (start := statistics.fmean(first.values())) >= LEAST_LEARNED
    ):
        return ""
    return (
        f"; hardly better than before training ({start:.4f}): try more rounds or local-epochs, a larger "
        "learning-rate, or a smaller batch-size"
    )


def outcome(run: dict[str, Any]) -> str:
    """Return a run's result in one line."""
    from server.results.summary import early_stop, round_name

    final = run["final"]
    score = run["score"]
    if final[f"{score}_mean"] is None:
        return f"{run['rounds']} rounds, nothing evaluated"
    when = round_name(final["round"], run["rounds"])
    when = when if when.startswith("after") else f"at {when}"
    scored = sum(silo[score] is not None for silo in run["per_silo"].values())
    return (
        f"{score} {final[f'{score}_mean']:.4f}, the mean of {scored} silos' test parts "
        f"{when} ({run['reports']} model; best of all rounds {run['bmcta']:.4f})"
        + (f"; {why}" if (why := early_stop(run)) else "")
    )


def partition(args: argparse.Namespace) -> None:
    from partitions.simulated import open_dataset
    from server.report.sections.silo_data import check_plot, plot_partition
    from server.results.manifest import write_partition
    from strategies.base.run_settings import parse_settings

    settings = parse_settings(run_values(args))
    c = settings.common
    if args.plot:
        check_plot(args.plot)
    manifest = write_partition(
        open_dataset(c.dataset, c.data_dir, c.seed, c.task),
        c.partition,
        Path(args.out),
        silos=c.silos,
        seed=c.seed,
        settings=settings.partition,
        validation=c.validation,
    )
    for silo in manifest["silos"]:
        print(
            f"{silo['name']}: {silo['n_train']} train, {silo['n_val']} val, {silo['n_test']} test"
        )
    if args.plot:
        plot_partition(manifest, Path(args.plot))
    print(args.out)


def evaluate_command(args: argparse.Namespace) -> None:
    from server.simulation.evaluate import evaluate, evaluate_deployed

    source, out = Path(args.source), Path(args.out)
    if args.study and not args.federation:
        raise UserError("--study goes with --federation: hospitals approve studies")
    if args.federation:
        matrix = evaluate_deployed(
            source,
            out,
            connection_of(args.federation),
            args.models,
            args.strategy,
            args.seed,
            args.study,
            args.network,
        )
    else:
        data = Path(args.data) if args.data else None
        matrix = evaluate(
            source, out, args.models, data, args.strategy, args.seed, args.network
        )
    print(matrix)


COMMANDS = (
    Command(
        "strategies",
        "list the methods",
        list_strategies,
        (
            flag("--json", "as JSON, with their settings"),
            file_option(
                "--for",
                "STUDY.toml",
                "those that can run in this study, with what the reference table has of them",
                dest="study",
            ),
            flag("--sums", "those that can run with secure-aggregation = true"),
            flag("--dp", "those that can run with differential privacy"),
            pairs(
                "--set", "KEY=VALUE", "those that can run with this, for example task=survival"
            ),
        ),
        examples=(
            "silofl strategies",
            "silofl strategies --for study.toml",
            "silofl strategies --sums --set task=survival",
        ),
    ),
    Command(
        "simulate",
        "run methods in this process",
        simulate_command,
        (
            *RUN_OPTIONS,
            STUDY,
            *DATA_OPTIONS,
            several(
                "--log",
                "LIBRARY",
                "also log to tensorboard or mlflow, below the run directory; may be repeated",
            ),
            option(
                "--workers",
                "N",
                "runs of a study that go on side by side, each in a process of its own, or ray: as many as Ray"
                " has room for; the numbers are the same",
                default="1",
            ),
            option(
                "--hold-out",
                "NAME[,NAME]|each",
                "also train without these hospitals, or once without each, and evaluate there what a newcomer gets",
            ),
            file_option(
                "--tuned",
                "DIR",
                "directories of silofl tune: run each method with its best settings; several differ in their "
                "seed alone",
                nargs="+",
                default=[],
            ),
        ),
        examples=(
            "silofl simulate --strategy local,fedavg,fedala --rounds 15 --out runs/first "
            "--set local-epochs=5 batch-size=16 learning-rate=0.1",
            "silofl simulate --config study.toml --seed 1,2,3 --workers 3",
            "silofl simulate --data ours.csv --recipe ours.recipe.toml --by hospital",
        ),
        description="Run one method, or a study of several methods and seeds, on this machine, or with "
        "--workers ray on a cluster. The last line printed is the run directory.",
    ),
    Command(
        "report",
        "make a run's report.html anew",
        report,
        (
            option("directory", "RUN", "a run directory"),
            flag("--checklist", "checklist.html: TRIPOD+AI, TRIPOD-Cluster, CONSORT-AI"),
        ),
        examples=("silofl report runs/first",),
    ),
    Command(
        "partition",
        "split a data set into one file per silo",
        partition,
        (
            option("--dataset", "D", "data set by name, or an .npz file"),
            *SPLIT_OPTIONS,
            option("--seed", "S", "seed of the split"),
            pairs(
                "--set",
                "KEY=VALUE",
                "a setting of the partition, for example dirichlet.beta=0.1, or validation=0.2",
            ),
            option("--plot", "FILE", "also draw who holds what (.png or .svg)"),
            option(
                "--out",
                "DIR",
                "directory for hospital-01.npz ... and manifest.json",
                required=True,
            ),
        ),
        examples=(
            "silofl partition --dataset digits --silos 12 --set dirichlet.beta=0.1 --out parts",
        ),
    ),
    Command(
        "evaluate",
        "metrics of a model, or of a run's models, at every silo, without training",
        evaluate_command,
        (
            option(
                "source",
                "RUN|MODEL.safetensors",
                "a run directory, or an exported model with its card",
            ),
            choice(
                "--models",
                ("shared", "all"),
                "of a run: the model that its silos share (the default), or also each silo's own that the "
                "report shows; one that never left its hospital has what the run measured there",
                "shared",
            ),
            OneOf(
                (
                    option("--data", "FILE", "at one silo's data file"),
                    option("--federation", "NAME|FEDERATION.yaml", "at a federation's silos"),
                )
            ),
            *OF_SEVERAL,
            option(
                "--network",
                "MODULE:FACTORY",
                "of a model file of your own network: run this code",
                default="",
            ),
            option(
                "--study",
                "NAME",
                "--federation: the study that the hospitals approved",
                default="",
            ),
            option(
                "--out", "DIR", "a new directory for matrix.csv and the models", required=True
            ),
        ),
        examples=(
            "silofl evaluate runs/first --models all --out matrix",
            "silofl evaluate ours.safetensors --data ours.npz --out scores",
        ),
        description="Evaluate the shared model of a run, all its models, or an exported model, without "
        "training and without touching states. DIR/matrix.csv has a row for each model, silo, "
        "split and metric. A run is evaluated at the silos of its simulation, unless --data or "
        "--federation says where.",
    ),
)
