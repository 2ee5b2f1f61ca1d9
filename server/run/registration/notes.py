"""Notes for the operator on the silos of a run: columns, labels, sample counts and weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from partitions.schema import few, moved, read_schema
from server.run.reporter import Reporter
from strategies.base.aggregation.screening import COUNT_SLACK, tolerated
from strategies.base.schema.data_summary import DataSpec, read_agreed, sample_weights
from strategies.base.schema.reporting import SCHEMA, WITHHELD, columns_of
from strategies.base.settings import Common
from strategies.base.strategy import PersonalizedStrategy

Summaries = Mapping[str, Mapping[str, Any]]  # data summaries by silo


def without_sums(summaries: Summaries, common: Common) -> list[str]:
    """Return the silos that withhold the sums of their columns: their own statistics standardise their data."""
    if common.normalization != "agreed":
        return []
    return [name for name, summary in summaries.items() if columns_of(summary) and "sum" not in summary]


def note_silos(summaries: Summaries, spec: DataSpec, common: Common, reporter: Reporter) -> None:
    """Report differences between the silos, and from an earlier run of this directory."""
    _note_withheld(summaries, common, reporter)
    _note_mapped(summaries, spec, reporter)
    if spec.own_file:  # a simulation draws its samples anew with every seed
        _note_changed_counts(summaries, reporter)


def _note_withheld(summaries: Summaries, common: Common, reporter: Reporter) -> None:
    alone = without_sums(summaries, common)
    for name in alone:
        reason = summaries[name].get(WITHHELD) or "its data summary has none"
        own = f"it is standardised by its own statistics, the others by those of {len(summaries) - len(alone)} silos"
        reporter.note(f"{name} gives no sums of its columns: {reason}; {own}")


def _note_mapped(summaries: Summaries, spec: DataSpec, reporter: Reporter) -> None:
    """Report silos that map their columns or labels to the agreed order, and silos without names for them."""
    agreed = spec.schema
    own = {name: read_schema(summary.get(SCHEMA, "")) for name, summary in summaries.items()}
    for name, schema in own.items():
        if moves := moved(schema, agreed):
            reporter.note(f"{name} has its {' and '.join(moves)} in another order: it maps them by name")
    for what in ("features", "labels"):
        silent = [name for name, schema in own.items() if getattr(agreed, what) and not getattr(schema, what)]
        if silent:
            verb = "names" if len(silent) == 1 else "name"
            reporter.note(f"{few(silent, 8)} {verb} no {what}: they are taken to be in the order of the other silos")


def _note_changed_counts(summaries: Summaries, reporter: Reporter) -> None:
    if reporter.directory is None:
        return
    counts = {name: summary["n_train"] for name, summary in summaries.items()}
    for name, before in reporter.directory.sample_counts().items():
        if counts.get(name, before) != before:
            reporter.note(f"{name} has {counts[name]} training samples now, and said {before} before")
    reporter.event("silos", samples=counts)


def note_weights(strategy: PersonalizedStrategy, common: Common, reporter: Reporter) -> None:
    """Report silos whose weight differs from their number of training samples."""
    if not strategy.info.trains:
        return
    agreed = read_agreed(common.agreed).get("samples", {})
    for name, info in strategy.silos.items():
        if info.n_train != (weight := strategy.samples[name]):
            why = "as agreed" if name in agreed else _bound_of_count(strategy, common, name)
            reporter.note(f"{name} says that it has {info.n_train} training samples; it counts as {weight}, {why}")


def _bound_of_count(strategy: PersonalizedStrategy, common: Common, silo: str) -> str:
    cap, agreed = common.weight_cap, read_agreed(common.agreed).get("samples", {})
    counts = {name: info.n_train for name, info in strategy.silos.items()}
    if sample_weights(counts, cap, agreed)[silo] == strategy.samples[silo]:
        return f"{cap:g} times the median (weight-cap)"
    return f"{COUNT_SLACK:g} times the largest but {tolerated(len(counts))} (robust = screen)"
