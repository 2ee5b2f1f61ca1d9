"""``silofl evaluate``: models of a run or a file, at the silos of a simulation, of a data file or of a federation."""

from __future__ import annotations

import contextlib
import logging
import shutil
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from client.app import app as client_app
from client.export import card_file, export_model
from client.protocol.policy import PUBLIC
from partitions.common.errors import UserError
from partitions.common.files import make_folder, private, write_atomically
from partitions.common.settings import toml_text
from server.deploy import submit
from server.results.models import any_kept, export_kept, export_shared, find_run
from server.run.evaluated_models import evaluation_settings, read_models
from server.run.evaluation import (
    MATRIX,
    MODELS,
    Cells,
    EvaluationLoop,
    add_cells,
    entry_of,
    own_cells,
    write_matrix,
)
from server.simulation.engine import InProcessGrid, flower_identity
from strategies.base.run_settings import RunSettings, parse_settings
from strategies.base.settings import Value

SHARED, ALL = "shared", "all"
OF_THE_DATA = (
    "dataset",
    "data-dir",
    "partition",
    "silos",
    "seed",
    "validation",
    "task",
    "threads",
    "device",
)


def gather_models(
    source: Path, folder: Path, which: str, strategy: str | None = None, seed: int | None = None
) -> list[Path]:
    """Collect the models of a run, or one model file, with their model cards in ``folder``; return their files.

    ``which``: ``shared``: the shared model of a run. ``all``: also the reported models of silos, if their states are on
    this machine or they have sent their models; the shared model may then be missing. Raises UserError.
    """
    folder.mkdir(parents=True)
    if source.is_file():
        if which == ALL:
            raise UserError(
                f"--models all: {source} is one model; a run directory has those of its silos"
            )
        for file in (source, card_file(source)):
            if not file.is_file():
                raise UserError(
                    f"there is no {file}: silofl export makes a model with its card"
                )
            shutil.copyfile(file, folder / file.name)
        return [folder / source.name]
    run = find_run(source, strategy, seed)
    chosen = run.common.which
    files: list[Path] = []
    try:
        export_shared(source, folder / f"{SHARED}.safetensors", *chosen)
        files.append(folder / f"{SHARED}.safetensors")
    except UserError:
        if which == SHARED:
            raise
    entry = entry_of(source, run) if which == ALL else {}
    for silo in entry.get("silos", ()):
        file = folder / f"{silo}.safetensors"
        if has_states(source, run):
            export_model(source, silo, "reported", file, *chosen)
        elif not export_kept(source, run, silo, entry, file):
            continue
        files.append(file)
    return files


def has_states(source: Path, run: RunSettings) -> bool:
    """Return whether a run's directory holds its silos' states, as after a simulation."""
    return (source / "checkpoint" / run.run_key / "silos").is_dir()


def settings_of_run(source: Path, run: RunSettings) -> dict[str, object]:
    """Return the settings that divide the data of a simulated run. Raises UserError for another run.

    The settings of a federation's run also contain a data set, the default, but its silos have their own data.
    """
    if not has_states(source, run) and not (source / "manifest.json").is_file():
        raise UserError(
            f"{source} was no simulation: --federation NAME, or --data FILE, says where to evaluate it"
        )
    values, division = run.flat(), f"{run.common.partition}."
    return {k: v for k, v in values.items() if k in OF_THE_DATA or k.startswith(division)}


def run_of(
    source: Path, strategy: str | None, seed: int | None, network: str
) -> tuple[RunSettings | None, str]:
    """Return a run, None for a model file, and the network of one's own that the models may be of. Raises UserError."""
    if not source.exists():
        raise UserError(
            f"there is no {source}: a run directory, or an exported model (.safetensors), is needed here"
        )
    if source.is_file():
        return None, network
    if network:
        raise UserError(
            f"--network goes with a model file; {source} is a run, whose settings name its network"
        )
    run = find_run(source, strategy, seed)
    return run, run.common.model


def evaluate(
    source: Path,
    out: Path,
    which: str = SHARED,
    data: Path | None = None,
    strategy: str | None = None,
    seed: int | None = None,
    network: str = "",
) -> Path:
    """Evaluate in this process, and return the path of ``matrix.csv``.

    ``data``: one silo's file, in place of the silos of the simulated run. ``network``: the network of one's own that a
    model file may be of. Raises UserError.
    """
    logging.getLogger("flwr").setLevel(logging.WARNING)
    run, network = run_of(source, strategy, seed, network)
    if run is None and data is None:
        raise UserError(
            f"{source} is a model: --data FILE, or --federation NAME, says where to evaluate it"
        )
    if (
        run
        and which == ALL
        and not (has_states(source, run) or any_kept(source / "checkpoint" / run.run_key))
    ):
        raise UserError(
            f"--models all: the silos' own models of {source} lie at the silos: --federation NAME evaluates there"
        )
    where = settings_of_run(source, run) if run and data is None else {"silos": 1}
    nodes: list[dict[str, Value]] = (
        []
        if data is None
        else [{"name": data.stem, "data": str(data.resolve()), "policy": PUBLIC}]
    )
    with new_directory(out):
        models = read_models(
            gather_models(source, out / MODELS, which, strategy, seed), network
        )
        settings = parse_settings({**where, **evaluation_settings(models, owned=False)})
        # With owners, as for a federation's study
        named = parse_settings({**where, **evaluation_settings(models)})
        with silos_here(out, settings, named, nodes) as grid:
            return write_matrix(out, EvaluationLoop(grid, settings).run(models))


@contextlib.contextmanager
def silos_here(
    out: Path, settings: RunSettings, written: RunSettings, nodes: Iterable[dict[str, Value]]
) -> Iterator[InProcessGrid]:
    """Write ``config.toml``, and yield the silos of a simulation, or those of these node configurations."""
    write_atomically(out / "config.toml", toml_text(written.flat()))
    grid = InProcessGrid(client_app, settings.common.silos, settings.flat())
    for context, node in zip(grid.contexts.values(), nodes, strict=False):
        context.node_config = node
    with flower_identity():
        yield grid


def check_new(out: Path) -> None:
    """Raise UserError unless ``out`` is an empty directory or does not exist."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is there already: give --out a new directory")


@contextlib.contextmanager
def new_directory(out: Path) -> Iterator[None]:
    """Make the directory, and remove it, or its content, if the block raises: no partial result remains."""
    check_new(out)
    before = out.exists()
    try:
        with private():
            make_folder(out)
            yield
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)
        if before:
            out.mkdir(parents=True)
        raise


def evaluate_deployed(
    source: Path,
    out: Path,
    connection: str,
    which: str,
    strategy: str | None,
    seed: int | None,
    study: str,
    network: str,
) -> Path:
    """Evaluate at the silos of a federation, and return the path of ``matrix.csv``.

    With ``all``, the matrix also has the run's metrics of each silo's model at that silo if the server does not hold
    the model. ``study``: the approved study that the evaluation belongs to. Raises UserError, RunFailedError.
    """
    check_new(out)
    run, network = run_of(source, strategy, seed, network)
    with tempfile.TemporaryDirectory() as temporary:
        files = gather_models(source, Path(temporary) / MODELS, which, strategy, seed)
        measured = own_cells(source, run) if run and which == ALL else []
        if files:
            values = {
                **evaluation_settings(read_models(files, network)),
                **({"study": study} if study else {}),
            }

            def fill(directory: Path) -> None:
                (directory / MODELS).mkdir()
                for path in (path for file in files for path in (file, card_file(file))):
                    shutil.copyfile(path, directory / MODELS / path.name)

            submit.run({**values, "out": str(out)}, connection, fill=fill)
        elif not measured:
            raise UserError(
                f"{source} holds no model, and its history no metrics of one: there is nothing to evaluate"
            )
    if run and which == ALL:
        add_own(
            source,
            out,
            run,
            measured,
            {file.name.removesuffix(".safetensors") for file in files},
        )
    return out / MATRIX


def add_own(
    source: Path, out: Path, run: RunSettings, measured: Cells, evaluated: Collection[str]
) -> None:
    """Add the run's own metrics to the matrix; print which models the federation did not evaluate, and why."""
    silos = [str(name) for name in entry_of(source, run)["silos"]]
    out.mkdir(parents=True, exist_ok=True)
    add_cells(out / MATRIX, measured, silos)
    if absent := [silo for silo in silos if silo not in evaluated]:
        why = "the server has no model of theirs that the report shows (a run with keep-models = reported asks for it)"
        if run.strategy.info.reports_shared and SHARED in evaluated:
            why = f"{run.common.strategy} has one model, {SHARED}"
        rest = "the matrix has what the run measured of each at its own hospital, and nothing of it elsewhere"
        print(f"not evaluated: {', '.join(absent)}: {why}; {rest}", file=sys.stderr)
