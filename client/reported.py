"""The model whose score the report prints, kept at the silo so that it can be exported.

The report takes every silo's score from one round, which is chosen when all silos' validation scores are in. So a silo
keeps two models of the snapshot that the method reports. ``reported`` is from the round that the report would use if
the run ended now; ``candidate`` is from the last evaluated round. Each message of the server contains the number of
the chosen round (``reported``), and the silo keeps that round's model. Nothing more leaves the silo. For a method that
reports ``personal`` models the candidate is the personal model, which is kept in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from client.local_data import agreed_schema
from models.samples import BYTE_MEAN, BYTE_STD
from models.shapes import write_shape
from models.trainable import describe_network
from strategies.base.client import SiloClient
from strategies.base.state import State, model_in, put_model

TERMS = "own_model_terms"  # in the numbers: study of all trainings ("": none), and the Flower run numbers
# Names of arrays, and of {"round", "metrics"} in the numbers
REPORTED, CANDIDATE = "reported", "candidate"


def note_terms(state: State, study: str, run: str, *, may_leave: bool) -> None:
    """Record in a loaded state the terms of the next message: the study's digest and Flower's run number.

    ``may_leave``: whether the run has silos send their own models. Without that, or under another study, the entry is
    removed, and a state that was trained without it never gets it back. The reason: the server chooses the run's id, by
    which a silo finds its state, and the settings of each submission.
    """
    before = state.numbers.get(TERMS, {} if state.numbers else {"study": study, "runs": []})
    if may_leave and before.get("study") == study:
        state.numbers[TERMS] = {"study": study, "runs": sorted({*before["runs"], run})}
    else:
        state.numbers.pop(TERMS, None)


def card_of(session: Any) -> dict[str, Any]:
    """Return what is needed to use a silo's model; it is saved with the model, so that export needs no server.

    ``normalisation`` is the mean and std for inputs, (x - mean) / std; None: inputs are used unchanged.
    """
    data, c = session.own_data, session.settings.common
    (mean, std), (label_mean, label_std) = session.statistics
    scale: dict[str, Any] | None = {"mean": mean, "std": std} if mean else None
    if data.train.x.dtype == np.uint8:
        scale = {"mean": BYTE_MEAN, "std": BYTE_STD}
    return {
        "silo": session.name,
        "method": c.strategy,
        "paper": session.info.paper,
        "seed": c.seed,
        "rounds": c.rounds,
        "reports": session.info.reports,
        "samples": {"train": len(data.train), "val": len(data.val), "test": len(data.test)},
        "model": describe_network(session.network, session.settings.head_name, session.part),
        "input": {
            "shape": write_shape(session.seen_shape),
            "dtype": data.dtype,
            **({"patch": True} if c.patch else {}),
        },
        "task": data.task,
        "classes": session.classes,
        "schema": {**agreed_schema(session.config).content, "dtype": data.dtype},
        "normalisation": scale,
        "labels": {"mean": label_mean, "std": label_std} if label_mean else None,
        **({"recipe": data.recipe} if data.recipe else {}),
        **({"trainer": c.trainer} if c.trainer else {}),
    }


def array_of(entry: str, snapshot: str) -> str:
    """Return the name of the array that holds the ``reported`` model or the ``candidate``."""
    return snapshot if (entry, snapshot) == (CANDIDATE, "personal") else entry


def keep_reported(
    state: State,
    wanted: object,
    snapshot: str,
    entries: Sequence[str] = (),
    untrained: Callable[[], tuple[Tensor, Tensor] | None] = lambda: None,
) -> None:
    """Keep the model of round ``wanted`` (the candidate or the reported one); drop a reported one of another round.

    ``entries``: the state's entries that a personal model needs to predict, beside its vector. ``untrained``: returns
    the personal model and its buffers, for a silo that was evaluated but has not trained yet.
    """
    if type(wanted) is not int:  # the server may send anything, or nothing
        return
    arrays, numbers = state.arrays, state.numbers
    candidate = numbers.get(CANDIDATE)
    # A personal model stays the same in rounds that only evaluate it.
    lasts = candidate and snapshot == "personal" and wanted > candidate["round"]
    if candidate and (wanted == candidate["round"] or lasts):
        put_model(arrays, REPORTED, model_in(arrays, array_of(CANDIDATE, snapshot)))
        numbers[REPORTED] = {**candidate, "round": wanted}
        if snapshot == "personal":
            _keep_entries(state, entries)
    elif snapshot == "personal" and (first := untrained()) is not None:
        put_model(arrays, REPORTED, (*first, None))
        numbers[REPORTED] = {"round": wanted, "metrics": {}}
        _drop_entries(state, entries)
    elif numbers.get(REPORTED, {}).get("round") != wanted:
        put_model(arrays, REPORTED, (None, None, None))
        numbers.pop(REPORTED, None)
        _drop_entries(state, entries)


def untrained_model(client: SiloClient) -> tuple[Tensor, Tensor] | None:
    """Return the silo's own model (Σ,) and running statistics before its first training; None afterwards."""
    if client.state.personal is not None:
        return None
    client.model.reset_buffers()
    return client.previous(), client.model.buffers.clone()


def load_reported(client: SiloClient, wanted: object, snapshot: str) -> bool:
    """Load the kept model of round ``wanted`` and the entries it predicts with; return whether the silo has it."""
    state = client.state
    for entry in (REPORTED, CANDIDATE):
        if entry in state.numbers and state.numbers[entry]["round"] == wanted:
            name = array_of(entry, snapshot)
            client.model.reset_buffers()
            client.model.load(state.arrays[name], *model_in(state.arrays, name)[1:])
            # The candidate's entries are those of the state
            if entry == REPORTED and snapshot == "personal":
                _load_entries(state, client.needed_to_predict)
            return True
    return False


def _keep_entries(state: State, entries: Sequence[str]) -> None:
    for key in entries:
        if key in state.numbers:
            state.numbers[REPORTED][key] = state.numbers[key]
        _move(state.arrays, key, f"{REPORTED}.{key}")


def _load_entries(state: State, entries: Sequence[str]) -> None:
    for key in entries:
        if key in state.numbers[REPORTED]:
            state.numbers[key] = state.numbers[REPORTED][key]
        _move(state.arrays, f"{REPORTED}.{key}", key)


def _drop_entries(state: State, entries: Sequence[str]) -> None:
    for key in entries:
        state.arrays.pop(f"{REPORTED}.{key}", None)


def _move(arrays: dict[str, Tensor], source: str, target: str) -> None:
    """Set ``target`` to the array ``source``; remove ``target`` if there is none."""
    if source in arrays:
        arrays[target] = arrays[source]
    else:
        arrays.pop(target, None)


def metrics_of(snapshot: str, metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of one snapshot, by names without it."""
    prefix = f"{snapshot}."
    return {
        k.removeprefix(prefix): float(v) for k, v in metrics.items() if k.startswith(prefix)
    }


def note_candidate(
    client: SiloClient, metrics: Mapping[str, Any], snapshot: str, state: State
) -> None:
    """Store the model that this round evaluated, if any, as the candidate in ``state``."""
    values = metrics_of(snapshot, metrics)
    if not any(name.partition(".")[0] in ("val", "test") for name in values):
        return
    state.numbers[CANDIDATE] = {"round": client.round, "metrics": values}
    if snapshot == "received":
        put_model(
            state.arrays,
            CANDIDATE,
            (client.received, client.received_buffers, client.received_integers),
        )


def keep_evaluated(
    client: SiloClient,
    metrics: Mapping[str, Any],
    state: State,
    snapshot: str,
    config: Mapping[str, Any],
) -> bool:
    """Keep the reported model and the candidate after an exchange without training; return whether to save ``state``.

    ``state``: the state before the exchange. A personal model does not change before the closing exchange. That
    message contains the round that the report shows.
    """
    closing = not config["personal"]
    if snapshot == "personal" and not (closing and CANDIDATE in state.numbers):
        return False
    keep_reported(state, config.get("reported"), snapshot, client.needed_to_predict)
    note_candidate(client, metrics, snapshot, state)
    if snapshot == "personal":
        del state.numbers[CANDIDATE]
    return True


def describe_models(
    client: SiloClient, card: dict[str, Any], metrics: Mapping[str, Any]
) -> None:
    """Add the descriptions and metrics of the silo's last and best personal models to its state."""
    numbers = client.state.numbers
    numbers["model"] = {**card, "no_file": client.no_file} if client.no_file else card
    numbers["metrics"] = metrics_of("personal", metrics)
    if numbers["best_round"] == client.round:
        numbers["best_metrics"] = numbers["metrics"]


def describe_evaluated(
    client: SiloClient, state: State, card: dict[str, Any], *, closing: bool
) -> None:
    """Add the silo's model card to ``state``, the state before an evaluation, if the silo has not trained yet."""
    described = state.numbers.setdefault("model", card)
    if closing:  # after the last round, which may be earlier than planned
        state.numbers["model"] = {**described, "rounds": client.round - 1}
