"""``silofl simulate``: one run, or a study of several methods and seeds, in this process."""

from __future__ import annotations

import itertools
import logging
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flwr.app import Context, RecordDict
from tqdm import tqdm

from client.app import app as client_app
from client.settings import RunSettings, defaults, parse_settings
from client.silo import device_of, split
from models.architectures import build
from server.engine import InProcessGrid, flower_identity
from server.history import History
from server.loop import Federation, Progress
from server.report import Study, silo_table, try_report, write_manifest
from server.rundir import RunDirectory, default_out
from server.summary import write_summary
from server.tracking import Tracker, open_trackers, round_values
from strategies.settings import UserError, Value


def study_runs(values: Mapping[str, object]) -> list[RunSettings]:
    """The runs of a study: every strategy with every seed. Raises UserError before anything is written."""
    names = [n.strip() for n in str(values.get("strategy", defaults()["strategy"])).split(",") if n.strip()]
    seeds = [s.strip() for s in str(values.get("seed", defaults()["seed"])).split(",") if s.strip()]
    if not names or not seeds:
        raise UserError("a study needs at least one strategy and one seed")
    for kind, given in (("strategy", names), ("seed", seeds)):
        if len(set(given)) < len(given):
            raise UserError(f"{kind} = {','.join(given)} names one of them twice")
    return [parse_settings({**values, "strategy": n, "seed": s}) for s, n in itertools.product(seeds, names)]


def study_config(runs: list[RunSettings]) -> dict[str, Value]:
    """Everything needed to repeat the study, as one flat mapping."""
    values: dict[str, Value] = {}
    for run in runs:
        values |= run.flat()
    values["strategy"] = ",".join(dict.fromkeys(r.common.strategy for r in runs))
    seeds = list(dict.fromkeys(r.common.seed for r in runs))
    values["seed"] = seeds[0] if len(seeds) == 1 else ",".join(map(str, seeds))
    plain = {k: v for k, v in values.items() if "." not in k}
    return plain | {k: v for k, v in values.items() if "." in k}


def check_run(run: RunSettings) -> None:
    """Load and split the data, build the network: whatever is wrong shows before anything is written."""
    device_of(run, server_context(run))
    whole, _ = split(run)
    name, options = run.model_for(whole.input_shape)
    build(name, whole.input_shape, whole.classes, dict(options))


def simulate(values: Mapping[str, object], *, quiet: bool = False, log: Sequence[str] = ()) -> Path:
    """Run the study in this process; returns its directory. Raises UserError, or RuntimeError where a run fails.

    The report is written in any case, and the comparison per silo goes to standard error. ``log`` names the libraries
    that record the study too (see ``server.tracking``).
    """
    trackers = open_trackers(log)
    runs = study_runs(values)
    for run in runs:
        check_run(run)
    first = runs[0].common
    config = study_config(runs)
    out = Path(first.out) if first.out else default_out(str(config["strategy"]))
    directory = RunDirectory.open(out, config, resume=first.resume)
    directory.lock()
    # A progress bar says it better than one log line per silo and round.
    logging.getLogger("flwr").setLevel(logging.WARNING)
    total = sum(r.common.rounds for r in runs)
    bar: tqdm[Any]
    try:
        with tqdm(
            total=total, unit="round", file=sys.stderr, disable=quiet, dynamic_ncols=True, smoothing=0.1
        ) as bar:
            for run in runs:
                run_one(run, directory, bar, trackers)
    except KeyboardInterrupt:
        config_file = directory.path / "config.toml"
        raise KeyboardInterrupt(
            f"continue with silofl simulate --config {config_file} --out {directory.path} --set resume=true"
        ) from None
    finally:
        try_report(directory.path)
    if not quiet:
        print(silo_table(Study(directory.path)), file=sys.stderr)
    return directory.path


def run_one(
    run: RunSettings, directory: RunDirectory, bar: tqdm[Any] | None = None, trackers: Sequence[Tracker] = ()
) -> None:
    """One method with one seed, added to the study's history and summary."""
    done: int | None = None

    def watch(progress: Progress) -> None:
        nonlocal done
        if bar is not None:
            if done is None:
                skip(bar, progress.round - 1)
            bar.set_description(run.run_key, refresh=False)
            if not math.isnan(progress.accuracy):  # the last evaluated round's stays
                bar.set_postfix_str(f"accuracy {progress.accuracy:.4f}", refresh=False)
            bar.update()
        done = progress.round
        record(progress.round)

    def record(server_round: int) -> None:
        if trackers:
            values = round_values(federation.history, run.common.strategy, run.common.seed, server_round)
            for tracker in trackers:
                tracker.record(server_round, values)

    state_path = directory.checkpoint(run.run_key) / "silos"
    grid = InProcessGrid(client_app, run.common.silos, run.flat(), state_path)
    which = {"strategy": run.common.strategy, "seed": run.common.seed}
    finished = False
    write_manifest(directory, run)
    for tracker in trackers:
        tracker.start(run, directory.path)
    try:
        with flower_identity():
            federation = Federation(grid, run, directory, watch)
            federation.run()
        record(run.common.rounds + 1)  # the closing evaluation
        write_summary(directory, History(directory.history), federation)
        finished = True
    except Exception as error:
        directory.progress("error", **which, message=str(error))
        raise
    finally:
        for tracker in trackers:
            tracker.end(failed=not finished)
    if bar is not None and done is None:
        skip(bar, run.common.rounds)  # all of it was done before
    directory.progress("done", **which, out=str(directory.path.resolve()))


def skip(bar: tqdm[Any], rounds: int) -> None:
    """Rounds that an earlier start of the study has done are there at once and do not count for the pace."""
    if not bar.disable:  # a disabled one has none of these
        bar.initial += rounds
        bar.last_print_n += rounds
        bar.n += rounds


def server_context(run: RunSettings) -> Context:
    """The context that Flower would give the ServerApp; tests run the app itself with it."""
    return Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=dict(run.flat()))
