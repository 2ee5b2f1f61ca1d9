"""Client registration: request each silo's data summary, and leave out silos that do not fit the others.

All silos register before the first round. Later, silos that were offline when the run was resumed may return, and
others may join if the setting ``late-joiners`` allows it (``readmission.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from flwr.serverapp import Grid

from models.tasks import Task, task_of
from models.training import use_threads
from partitions.common.errors import UserError
from partitions.schema import few, find_moved, read_schema
from server.results.reasons import merge_reasons
from server.results.run_directory import RunDirectory
from server.run.receipts import Receipts
from server.run.registration.data_summaries import (
    Candidates,
    IdentityRegistry,
    LateJoiners,
    SummaryRequests,
)
from server.run.reporter import WEIGHTS, Progress, Reporter
from strategies.base.aggregation.secure import weights_of
from strategies.base.plan import OFFLINE, SiloInfo
from strategies.base.robust import COUNT_SLACK, tolerated_faults
from strategies.base.run_settings import RunSettings
from strategies.base.settings import Common
from strategies.base.state import State
from strategies.base.strategy import PersonalizedStrategy
from strategies.base.transport.data_summary import (
    DataSpec,
    Summary,
    declared_spec,
    misfit,
    read_agreed,
    read_data_spec,
    reconcile,
)
from strategies.base.transport.reporting import SCHEMA, WITHHELD, columns_of

Summaries = Mapping[str, Mapping[str, Any]]  # data summaries by silo


def without_sums(summaries: Summaries, common: Common) -> list[str]:
    """Return the silos that withhold the sums of their columns: their own statistics standardise their data."""
    if common.normalization != "agreed":
        return []
    return [
        name
        for name, summary in summaries.items()
        if columns_of(summary) and "sum" not in summary
    ]


def note_silos(
    summaries: Summaries, spec: DataSpec, common: Common, reporter: Reporter
) -> None:
    """Report differences between the silos, and from an earlier run of this directory."""
    _note_withheld(summaries, common, reporter)
    _note_mapped(summaries, spec, reporter)
    if spec.own_file:  # a simulation draws its samples anew with every seed
        _note_changed_counts(summaries, reporter)


def _note_withheld(summaries: Summaries, common: Common, reporter: Reporter) -> None:
    alone, lines = without_sums(summaries, common), dict[str, str]()
    for name in alone:
        reason = summaries[name].get(WITHHELD) or "its data summary has none"
        share = f"it is standardised by its own statistics, the others by those of {len(summaries) - len(alone)} silos"
        lines[name] = f"{name} gives no sums of its columns: {reason}; {share}"
    reporter.note_reasons(lines.items())


def _note_mapped(summaries: Summaries, spec: DataSpec, reporter: Reporter) -> None:
    """Report silos that map their columns or labels to the agreed order, and silos without names for them."""
    agreed = spec.schema
    schemas = {
        name: read_schema(summary.get(SCHEMA, "")) for name, summary in summaries.items()
    }
    moved = (
        (name, f"{name} has its {' and '.join(moves)} in another order: it maps them by name")
        for name, schema in schemas.items()
        if (moves := find_moved(schema, agreed))
    )
    reporter.note_reasons(moved)
    lacking = {name: schema.unlabelled for name, schema in schemas.items() if schema.unlabelled}
    reporter.note_reasons(
        (name, f"{name} does not label {few(labels, 8)}: its losses and scores leave that out")
        for name, labels in lacking.items()
    )
    if len(lacking) == len(schemas):
        nowhere = set.intersection(*map(set, lacking.values()))
        if nowhere:
            reporter.note(f"no hospital labels {few(sorted(nowhere), 8)}: nothing trains it")
    for what in ("features", "labels"):
        silent = [
            name
            for name, schema in schemas.items()
            if getattr(agreed, what) and not getattr(schema, what)
        ]
        if silent:
            verb = "names" if len(silent) == 1 else "name"
            reporter.note(
                f"{few(silent, 8)} {verb} no {what}: they are taken to be in the order of the other silos"
            )


def _note_changed_counts(summaries: Summaries, reporter: Reporter) -> None:
    if reporter.directory is None:
        return
    counts = {name: summary["n_train"] for name, summary in summaries.items()}
    for name, before in reporter.directory.sample_counts().items():
        if counts.get(name, before) != before:
            reporter.note(
                f"{name} has {counts[name]} training samples now, and said {before} before"
            )
    reporter.event("silos", samples=counts)


def note_weights(strategy: PersonalizedStrategy, common: Common, reporter: Reporter) -> None:
    """Report silos whose weight differs from their number of training samples."""
    if not strategy.info.trains:
        return
    agreed = read_agreed(common.agreed).get("samples", {})
    weights, secure = strategy.plan.samples, common.secure_aggregation
    if secure:
        weights = weights_of(strategy, strategy.silos)
        if {*weights.values()} == {1}:  # the method's mean weights all silos equally
            return
    for name, info in strategy.silos.items():
        if info.n_train != (weight := weights[name]):
            why = ", as agreed"
            if name not in agreed or secure:
                bound = _bound_of_count(strategy, common, name, secure)
                why = f", so that no hospital outweighs the others: {bound}"
            line = f"{name}'s {info.n_train} training samples count as {weight}{why}"
            reporter.note(line, part=WEIGHTS)


def _bound_of_count(
    strategy: PersonalizedStrategy, common: Common, silo: str, secure: bool
) -> str:
    if secure:
        return "its share of a sum (secure-aggregation)"
    screened = strategy.plan
    capped = screened.with_silos(strategy.silos.values(), replace(common, robust="none"))
    if capped.samples[silo] == screened.samples[silo]:
        return f"at most {common.weight_cap:g} times the median (weight-cap)"
    others = tolerated_faults(len(strategy.silos))
    return f"at most {COUNT_SLACK:g} times the largest but {others} (robust = screen)"


class Registration:
    """The silos of one run: their data summaries, names and keys, and the silos left out."""

    def __init__(
        self,
        grid: Grid,
        settings: RunSettings,
        directory: RunDirectory | None,
        watch: Callable[[Progress], object] | None = None,
    ) -> None:
        self.grid = grid
        self.common = settings.common
        self.run_name = directory.name if directory else ""
        self.reporter = Reporter(settings.common, directory, watch)
        self.identities = IdentityRegistry()
        self.receipts = Receipts.of(
            directory.path if directory else None, self.reporter.note, self.identities.names
        )
        self.trains = settings.strategy.info.trains
        self.summaries: dict[str, dict[str, Any]] = {}
        self.data_spec = DataSpec(True, (), 1)
        # The held-out hospitals that are online and fit
        self.held_out: dict[str, SiloInfo] = {}
        self.silos: dict[str, SiloInfo] = {}  # the run's silos, also those that are offline
        self.joined: dict[str, int] = {}  # silo that joined during the run -> its first round
        self.left_out: dict[str, str] = {}  # silo or node that does not take part -> reason
        # Nodes that answered with an error; they are asked again
        self.faulty: dict[int, str] = {}
        self.late = LateJoiners(settings.common)
        self.requests = SummaryRequests(
            grid, settings.common, self.reporter, self.receipts, self.late, self.identities
        )
        # Silo -> fingerprint of its key, if its name is registered
        self.keys: dict[str, str] = {}
        self.nodes: dict[int, str] = {}  # node -> name, also of nodes that do not take part

    @property
    def task(self) -> Task:
        """The task that all silos train on."""
        return task_of(self.data_spec.task)

    @property
    def simulated(self) -> bool:
        """Whether all silos are simulated."""
        return all(summary["simulated"] for summary in self.summaries.values())

    def name_of(self, node: int) -> str:
        """Return a node's name, or ``node ID`` if it is unknown."""
        return self.nodes.get(node, f"node {node}")

    def register(self, saved: State | None = None) -> None:
        """Wait for the silos, request each one's data summary, and leave out those that do not fit the others.

        ``saved``: the checkpoint of the resumed run; its silos are expected, and its schema and keys apply.
        """
        c = self.common
        use_threads(c.threads, c.tf32, deterministic=c.deterministic)
        self.keys = dict(saved.numbers["keys"]) if saved else {}
        self.identities.known = dict(self.keys)
        candidates = Candidates()
        before: dict[str, dict[str, Any]] = saved.numbers["cards"] if saved else {}
        online = self.requests.wait(candidates, before)
        for n, summary in candidates.summaries.items():
            if self.late.is_late(name := summary["name"], before):
                self.late.wait(name, n, summary)
        summaries = {candidates.summaries[n]["name"]: candidates.summaries[n] for n in online}
        held = {name: summaries.pop(name) for name in self.common.held_out if name in summaries}
        self._agree(summaries, candidates.faults, saved)
        self.faulty = candidates.faults
        nodes_of = {candidates.summaries[n]["name"]: n for n in online}
        self.nodes = {
            n: self.identities.registered_name(n)
            for n in (*candidates.faults, *candidates.impostors)
        }
        self.nodes |= {n: summary["name"] for n, summary in candidates.summaries.items()}
        self.keys |= {
            name: key for name in self.summaries if (key := self.identities.key(nodes_of[name]))
        }
        if self.trains:
            note_silos(self.summaries, self.data_spec, self.common, self.reporter)
        self._hold_out(held, nodes_of)
        self._check_late()
        self.silos = {
            name: silo_info(summary, nodes_of[name]) for name, summary in self.summaries.items()
        }
        if saved is not None:
            self._add_absent(saved)

    def _hold_out(
        self, held: Mapping[str, Mapping[str, Any]], nodes_of: Mapping[str, int]
    ) -> None:
        """Set the held-out hospitals, which had no part in the schema; report those that do not fit or are offline.

        Raises UserError in a simulation without a silo of that name.
        """
        for name in self.common.held_out:
            if name not in held and self.simulated:
                raise UserError(f"hold-out = {self.common.hold_out}: there is no silo {name!r}")
            spec = self.data_spec.values
            fault = (
                misfit(held[name], spec, "the others have")
                if name in held
                else "it is not here"
            )
            if fault:
                self.leave_out(name, f"{name}, which is held out, is not evaluated: {fault}")
            else:
                self.held_out[name] = silo_info(held[name], nodes_of[name])

    def _check_late(self) -> None:
        """Raise UserError if ``late-joiners`` names a hospital that does not exist in a simulation."""
        for name in self.common.late:
            if self.simulated and name not in {**self.late.waiting, **self.summaries}:
                raise UserError(
                    f"late-joiners = {self.common.late_joiners}: there is no silo {name!r}"
                )

    def _agree(
        self, summaries: Mapping[str, Summary], faults: Mapping[int, str], saved: State | None
    ) -> None:
        """Reconcile the schema of all silos, and report those left out. Raises UserError if no quorum remains."""
        known = declared_spec(read_agreed(self.common.agreed))
        source = "the federation file has"
        if saved is not None:
            known, source = saved.numbers["facts"], "this run has"
        sums = self.common.normalization == "agreed"
        reconciled = reconcile(
            list(summaries.values()), read_data_spec(known), source, sums=sums
        )
        self.left_out = {
            self.identities.registered_name(node): fault for node, fault in faults.items()
        }
        self.left_out |= reconciled.left_out
        if len(reconciled.summaries) < (self.common.min_silos or 1):
            raise UserError("; ".join(merge_reasons(self.left_out.items())))
        self.reporter.note_reasons(self.left_out.items())
        self.left_out |= self.requests.strangers  # already reported
        self.data_spec, self.summaries = reconciled.data_spec, reconciled.summaries

    def _add_absent(self, saved: State) -> None:
        """Add the checkpoint's silos that are offline, if a quorum is online; the run goes on without them.

        Their data summaries are restored from the checkpoint, so that the agreed schema does not change.
        """
        saved_summaries: dict[str, dict[str, Any]] = saved.numbers["cards"]
        offline = {
            n: s
            for n, s in saved_summaries.items()
            if n not in self.summaries and not s["simulated"]
        }
        faulty = len(self.left_out) - len(
            self.requests.strangers
        )  # silos left out are not waited for
        if not self.common.min_silos and len(offline) > faulty:
            return
        self.summaries = dict(sorted({**self.summaries, **offline}.items()))
        self.silos |= {name: silo_info(summary, OFFLINE) for name, summary in offline.items()}

    def misfit(self, summary: Summary) -> str:
        """Return how a silo's data do not fit the run's schema; empty if they fit."""
        return misfit(summary, self.data_spec.values, "this run has")

    def leave_out(self, name: str, reason: str) -> None:
        """Leave out a silo, and report the reason."""
        self.left_out[name] = reason
        self.reporter.note(reason)

    def enter(self, node: int, summary: dict[str, Any]) -> None:
        """Add a silo with its data summary, node and key to the run."""
        name = summary["name"]
        self.silos[name] = silo_info(summary, node)
        self.nodes[node] = name
        self.summaries = dict(sorted({**self.summaries, name: summary}.items()))
        for known in (name, self.identities.registered_name(node)):
            self.left_out.pop(known, None)
        if key := self.identities.key(node):
            self.keys[name] = key


def silo_info(summary: Mapping[str, Any], node: int) -> SiloInfo:
    """Return a silo's name, node and sample counts."""
    return SiloInfo(
        summary["name"], node, summary["n_train"], summary["n_val"], summary["n_test"]
    )
