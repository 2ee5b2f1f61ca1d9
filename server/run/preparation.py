"""Preparation of a run: the strategy, and the settings that every silo receives."""

from __future__ import annotations

from collections.abc import Iterable

from models.initialisation import flat_model, initial_model
from models.standardisation import agreed_statistics
from partitions.common.errors import UserError
from server.results.study import start_strategy
from server.run.checkpoints import LoopState
from server.run.registration.registration import Registration, note_weights, without_sums
from strategies.base.info import SiloInfo
from strategies.base.run_settings import RunSettings
from strategies.base.settings import Common
from strategies.base.strategy import PersonalizedStrategy
from strategies.base.transport.reporting import SCHEMA


def check_patience(common: Common, silos: Iterable[SiloInfo]) -> None:
    """Raise UserError if early stopping is set and no silo has validation data."""
    if common.patience and not any(silo.n_val for silo in silos):
        raise UserError(
            f"patience = {common.patience}: no silo has a part for validation, by which a run stops early; set "
            "validation = 0.2, or patience = 0"
        )


def prepare(
    settings: RunSettings, registration: Registration, run_state: LoopState
) -> PersonalizedStrategy:
    """Return the strategy in its state before round 1."""
    c, spec, task = settings.common, registration.data_spec, registration.task
    settings.check_task(task, spec.classes)
    settings.augmentation_for(spec.shape)
    name, options = settings.model_for(spec.shape, task.name)
    head, part = settings.head, settings.part()
    sha256 = part.weights.sha256 if part.weights else ""
    if run_state.weights not in ("", sha256):
        raise UserError(
            f"init-weights = {c.init_weights} is another file than the run began with: restore it"
        )
    run_state.weights = sha256
    # Not kept: the server needs the layout alone
    model = flat_model.__wrapped__(name, spec.shape, spec.classes, options, "cpu", head, part)
    initial = initial_model(name, spec.shape, spec.classes, options, c.seed, head, part)
    strategy = start_strategy(settings, model, registration.silos.values(), initial)
    note_weights(strategy, c, registration.reporter)
    if not run_state.statistics:
        run_state.statistics = {
            **agreed_statistics(list(registration.summaries.values()), strategy.samples)
        }
        if own := without_sums(registration.summaries, c):
            run_state.statistics["own_statistics"] = own
    run_state.numbers = {
        "classes": spec.classes,
        "task": task.name,
        "run": registration.run_name,
        "min_metric_samples": c.min_metric_samples or (10 if spec.own_file else 1),
        **run_state.statistics,
    }
    run_state.numbers |= {"weights": sha256} if sha256 else {}
    if spec.schema.features or spec.schema.labels:
        run_state.numbers[SCHEMA] = spec.schema.text
    return strategy
