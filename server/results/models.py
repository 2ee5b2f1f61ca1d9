"""Models that the server holds of a run: the shared one, and silos' own that it has collected.

Shared (``export --which shared``): the checkpoint holds the newest aggregate. If the method's report shows the received
model, the checkpoint also holds the model that the silos received in the reported round.

Own (``keep-models = reported``), which ``silofl evaluate --models all`` exports with model cards::

    checkpoint/RUN/own/SILO/model.safetensors
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import Tensor

from client.export import when, write_model
from client.exporting.model_card import Card, checked_card
from models.layout import Layout
from models.shapes import columns, kind_of, read_shape, write_shape
from models.trainable import describe_network
from partitions.common.errors import DataError, UserError
from server.results.reading import find_entry
from server.results.run_directory import (
    NAMES,
    REPORTED,
    RunDirectory,
    check_holds_run,
    load_checkpoint,
    read_toml,
    shared_arrays,
)
from server.results.study import run_network, study_runs
from strategies.base.evaluation import OWN
from strategies.base.run_settings import RunSettings
from strategies.base.state import BUFFERS, GLOBAL, State
from strategies.base.transport.payload import Payload, check_statistics, check_vector
from strategies.base.transport.reporting import SCHEMA


def _reported_model(state: State) -> dict[int, dict[str, Tensor]]:
    """Return the shared model of the reported round, by the round; empty if it is not kept."""
    if REPORTED + GLOBAL not in state.arrays:
        return {}
    arrays = {n: state.arrays[REPORTED + n] for n in NAMES if REPORTED + n in state.arrays}
    return {state.numbers["reported"]: arrays}


def export_shared(
    source: Path,
    out: Path,
    strategy: str | None = None,
    seed: int | None = None,
    round: int | None = None,
) -> Card:
    """Save the shared model, and return its card.

    The default is the model whose score the report shows, if that is a shared one, else the newest. ``round`` selects
    the model that was received in that round. Raises UserError if there is no such model, or more than one run.
    """
    run = find_run(source, strategy, seed)
    state, _ = load_checkpoint(source / "checkpoint" / run.run_key)
    if state is None:
        raise UserError(
            f"{source} has no checkpoint of {run.run_key}: the server's run directory is needed here"
        )
    spec, c = state.numbers["facts"], run.common
    network = run_network(run, read_shape(spec["shape"]), spec["classes"], spec["task"])
    newest = shared_arrays(state.arrays, run.strategy, network.layout.size)
    if not newest:
        raise UserError(
            f"{c.strategy} has no model that all silos share: export a silo's with --silo NAME"
        )
    kept = {state.numbers["round"] + 1: newest, **_reported_model(state)}
    final = final_of(source, run)
    shown = (
        (final.get("round") or state.numbers.get("reported"))
        if run.strategy.info.reports_shared
        else None
    )
    wanted = round or shown or state.numbers["round"] + 1
    if wanted not in kept:
        known = " and ".join(map(str, sorted(kept)))
        raise UserError(
            f"{source} holds no shared model of round {wanted}, but of {known}: name one by --round"
        )
    score = mean_score(final) if wanted == shown else {}
    metrics = {f"test.{key}": value for key, value in score.items()}
    card = checked_card(
        model_card(run, state, wanted, metrics, final.get("rounds", c.rounds)), source
    )
    return write_model(out, card, (kept[wanted][GLOBAL], kept[wanted].get(BUFFERS), None))


def mean_score(final: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mean score of a run's result by its key; empty if unknown."""
    key = f"{final.get('score', '')}_mean"
    return {key: final[key]} if final.get(key) is not None else {}


def model_card(
    run: RunSettings, state: State, server_round: int, metrics: Mapping[str, Any], rounds: int
) -> dict[str, Any]:
    """Return the content of a shared model's card. ``rounds``: the number of rounds of the run."""
    spec, c = state.numbers["facts"], run.common
    shape = read_shape(spec["shape"])
    mean, std, labels = statistics(run, state, shape)
    return {
        "method": c.strategy,
        "paper": run.strategy.info.paper,
        "seed": c.seed,
        "silo": None,
        "run": state.numbers["run_id"],
        "which": "shared",
        "snapshot": "received",
        "round": server_round,
        "when": when("received", server_round, rounds),
        "metrics": dict(metrics),
        "samples": {
            p: sum(silo[f"n_{p}"] for silo in state.numbers["cards"].values())
            for p in ("train", "val", "test")
        },
        "model": describe_network(
            run.model_for(shape, spec["task"]), run.head_name, run.part()
        ),
        "input": {
            "shape": write_shape(shape),
            "dtype": "float32" if kind_of(shape) == "table" else None,
            **({"patch": True} if c.patch else {}),
        },
        "task": spec["task"],
        "classes": spec["classes"],
        "schema": {key: value for key, value in spec.get(SCHEMA, {}).items() if key != "table"},
        "normalisation": {"mean": mean, "std": std} if mean else None,
        "labels": labels,
        "silofl": version("silofl"),
        **({"trainer": c.trainer} if c.trainer else {}),
    }


def find_run(source: Path, strategy: str | None, seed: int | None) -> RunSettings:
    """Return the requested run of a directory. Raises UserError if there is none, or more than one."""
    check_holds_run(source)
    runs = study_runs(read_toml(source / "config.toml"))
    chosen = [
        r
        for r in runs
        if strategy in (None, r.common.strategy) and seed in (None, r.common.seed)
    ]
    names = ", ".join(run.run_key for run in (chosen or runs))
    if not chosen:
        raise UserError(f"{source} holds no such run; there are: {names}")
    if len(chosen) > 1:
        raise UserError(
            f"{source} holds several runs: {names}; choose with --strategy and --seed"
        )
    return chosen[0]


def final_of(source: Path, run: RunSettings) -> dict[str, Any]:
    """Return the run's result in ``summary.json``, with the name of its score; empty for an unfinished run."""
    entry = find_entry(RunDirectory(source).summary, run.common.which) or {"final": {}}
    return {**entry["final"], **{k: entry[k] for k in ("score", "rounds") if k in entry}}


def statistics(
    run: RunSettings, state: State, shape: tuple[Any, ...]
) -> tuple[Any, Any, dict[str, Any] | None]:
    """Return mean and standard deviation of the inputs' columns, and of labels that are measurements.

    Raises UserError if every silo standardises by its own statistics: then the shared model has none.
    """
    measured = state.numbers["facts"]["task"] == "regression"
    d = columns(shape)
    if run.common.normalization == "silo" and (d or measured):
        raise UserError(
            "normalization = silo: every silo standardises by its own statistics, which the shared model is used with; "
            "export it at a silo, with --silo NAME --which reported"
        )
    mean, std = (list(state.numbers["statistics"].get(key, ())) for key in ("mean", "std"))
    return mean[:d], std[:d], {"mean": mean[d:], "std": std[d:]} if mean[d:] else None


FOLDER, FILE = "own", "model.safetensors"


def any_kept(checkpoint: Path | None) -> bool:
    """Return whether this run has collected a silo's own model."""
    return checkpoint is not None and any(checkpoint.glob(f"{FOLDER}/*/{FILE}"))


def keep_model(
    checkpoint: Path, silo: str, server_round: int, payload: Payload, layout: Layout
) -> None:
    """Store a silo's own model of this round under the name of the silo that sent it.

    Raises DataError if it is no model of the run's network.
    """
    sizes = {OWN: layout.size, **({BUFFERS: layout.buffer_size} if layout.buffer_size else {})}
    if set(payload.models) != set(sizes):
        raise DataError(
            f"the reply holds {', '.join(sorted(payload.models)) or 'nothing'}, not {', '.join(sizes)}"
        )
    vectors = {name: payload.models[name].vector for name in sizes}
    for name, vector in vectors.items():
        check_vector(name, vector, sizes[name])
    if BUFFERS in vectors:
        check_statistics(vectors[BUFFERS], layout, [slice(0, layout.buffer_size)])
    State(vectors, {"silo": silo, "round": server_round}).save(
        checkpoint / FOLDER / silo / FILE
    )


def export_kept(
    source: Path, run: RunSettings, silo: str, entry: Mapping[str, Any], out: Path
) -> bool:
    """Export a silo's collected model with its card; return whether there is one of the reported round.

    ``entry``: the run's entry in ``summary.json``. Raises UserError for a file that cannot be used.
    """
    checkpoint = source / "checkpoint" / run.run_key
    file = checkpoint / FOLDER / silo / FILE
    wanted = entry["per_silo"].get(silo, {}).get("round")
    if not file.is_file():
        return False
    try:
        kept, (state, _) = State.load(file), load_checkpoint(checkpoint)
    except DataError as error:
        raise UserError(str(error)) from None
    if state is None:
        raise UserError(f"{checkpoint} has no checkpoint, which says what the models in it are")
    if kept.numbers["round"] != wanted:  # the report changed since: the run was resumed
        return False
    card = model_card(run, state, wanted, {}, entry["rounds"])
    summary = state.numbers["cards"][silo]
    card |= {"silo": silo, "which": "reported", "snapshot": entry["reports"]}
    card |= {"when": when(entry["reports"], wanted, entry["rounds"])}
    card |= {"samples": {part: summary[f"n_{part}"] for part in ("train", "val", "test")}}
    write_model(
        out, checked_card(card, file), (kept.arrays[OWN], kept.arrays.get(BUFFERS), None)
    )
    return True
