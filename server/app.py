"""The ServerApp: one run of one method, started by ``silofl simulate``, ``silofl run`` or ``flwr run``."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping
from logging import ERROR, INFO
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.common import log
from flwr.serverapp import Grid, ServerApp

from client.faults import is_fault, line_of
from client.flower.grid import own_grid
from partitions.common.files import is_full, private
from server.results.history import History
from server.results.run_directory import RunDirectory, default_out
from server.results.summary import write_summary
from server.results.survey import write_survey
from server.run.evaluation import EvaluationLoop, models_in, write_matrix
from server.run.loop import RoundLoop
from server.run.reporter import Reporter
from server.run.survey import survey_silos
from strategies.base.run_settings import RunSettings, parse_settings

app = ServerApp()  # no annotation: Flower finds the app by reading this line


@app.main()
def run_app(grid: Grid, context: Context) -> None:
    """Execute the run in its run directory. A failed run raises its error, so that Flower marks it as failed."""
    gc.freeze()  # an exchange searches for cycles, which need not pass through the libraries each time
    grid = own_grid(grid)
    settings = parse_settings(context.run_config)
    c = settings.common
    out = Path(c.out) if c.out else default_out(c.strategy)
    # A study (several methods or seeds) writes its config before its first run starts.
    member = bool(c.out) and (out / "study").exists()
    with (
        private(),
        RunDirectory.open(out, settings.flat(), resume=c.resume, member=member) as directory,
    ):
        info = settings.strategy.info
        Reporter(settings.common, directory).event("start")
        try:
            with errors_recorded(directory, settings):
                if info.trains:
                    train(grid, settings, directory, context.run_config)
                elif info.role.asks == "survey":
                    run_survey(grid, settings, directory, context.run_config)
                else:
                    run_evaluation(grid, settings, directory)
        except Exception as error:
            log(ERROR, "%s", line_of(error), exc_info=error if is_fault(error) else None)
            raise
        finally:
            if info.trains:
                from server.report.write import try_report

                try_report(directory.path)
        record_end(directory, settings)
        log(INFO, "run directory: %s", directory.path.resolve())


def run_evaluation(grid: Grid, settings: RunSettings, directory: RunDirectory) -> None:
    """Evaluate the models in the directory, and write ``matrix.csv`` (``silofl evaluate``)."""
    models = models_in(directory.path, settings)
    write_matrix(directory.path, EvaluationLoop(grid, settings, directory).run(models))


def run_survey(
    grid: Grid, settings: RunSettings, directory: RunDirectory, run_config: Mapping[str, Any]
) -> None:
    """Survey the silos' data, and write the answers and the page (``silofl survey``)."""
    from server.report.survey import write_survey_page

    write_survey(directory.path, survey_silos(grid, settings, directory, run_config))
    write_survey_page(directory.path)


def train(
    grid: Grid, settings: RunSettings, directory: RunDirectory, run_config: Mapping[str, Any]
) -> None:
    """Train, and write the summary. ``run_config``: the settings as the silos have them."""
    federation = RoundLoop(grid, settings, directory, run_config=run_config)
    federation.run()
    if federation.registration.simulated:
        from server.report.write import write_manifest

        write_manifest(directory, settings)
    write_summary(directory, History(directory.history), federation.finish_run())


@contextlib.contextmanager
def errors_recorded(directory: RunDirectory, settings: RunSettings) -> Iterator[None]:
    """Context that adds an error to the run's progress before it is raised, where the disk has room."""
    try:
        yield
    except Exception as error:
        if not is_full(error):
            Reporter(settings.common, directory).event("error", message=line_of(error))
        raise


def record_end(directory: RunDirectory, settings: RunSettings) -> None:
    Reporter(settings.common, directory).event("done", out=str(directory.path.resolve()))
