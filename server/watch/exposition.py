"""Metrics of a picture in Prometheus's text format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE
from prometheus_client.registry import Collector

__all__ = ["CONTENT_TYPE", "exposition"]

STATES = ("waiting", "running", "done", "failed")
RUN = ["strategy", "seed"]
OF_RUNS = {
    "round": ("silofl_run_rounds_done", "rounds that are done"),
    "rounds": ("silofl_run_rounds_planned", "rounds that are planned"),
    "best_round": ("silofl_run_best_round", "round with the best mean validation score so far"),
    "best_validation": (
        "silofl_run_best_validation_score",
        "mean validation score of that round",
    ),
    "best_test": ("silofl_run_best_test_score", "mean test score of that round"),
    "gain": (
        "silofl_run_gain_over_local",
        "mean gain over a finished run of the method local, same seed",
    ),
}
OF_CURRENT = {
    "took": ("silofl_elapsed_seconds", "seconds of all rounds so far"),
    "pace": ("silofl_round_seconds", "mean seconds of the last rounds"),
    "left": ("silofl_remaining_seconds", "estimated seconds to the end"),
}
OF_SILOS = {
    "waits": ("silofl_silo_asked", "1 while the silo's reply is awaited"),
    "is_late": ("silofl_silo_late", "1 while the silo is late"),
    "is_left_out": ("silofl_silo_left_out", "1 if the last round went on without the silo"),
    "missed": ("silofl_silo_rounds_missed", "rounds that went on without the silo"),
    "seconds": ("silofl_silo_reply_seconds", "seconds that the silo's last reply took"),
    "gain": (
        "silofl_silo_gain_over_local",
        "test score minus that of a finished run of local, same seed",
    ),
    "epsilon": (
        "silofl_silo_epsilon",
        "privacy budget that the silo has spent, where it reports it",
    ),
}
# Values of the labels, value; None: no sample
Samples = Iterable[tuple[Sequence[str], float | None]]


def exposition(picture: Mapping[str, Any]) -> bytes:
    """Return the metrics of each run, and of the silos of the current run."""
    registry = CollectorRegistry()
    registry.register(PictureCollector(picture))
    return generate_latest(registry)


class PictureCollector(Collector):
    """Collector of prometheus-client over one picture."""

    def __init__(self, picture: Mapping[str, Any]) -> None:
        self.picture = picture

    def collect(self) -> Iterator[Metric]:
        """Yield every metric; an unknown value has no sample."""
        runs, run = self.picture["runs"], self.picture["run"]
        readable = "silofl_source_readable", "1 while the run's progress.jsonl can be read"
        yield gauge(readable, [], [((), not self.picture["fault"])])
        states = (
            ([*which(found), name], found["state"] == name) for found in runs for name in STATES
        )
        yield gauge(
            ("silofl_run_state", "1 for the state that a run is in"), [*RUN, "state"], states
        )
        for key, about in OF_RUNS.items():
            yield gauge(about, RUN, [(which(found), found[key]) for found in runs])
        if run is None:
            return
        sent = CounterMetricFamily(
            "silofl_payload_bytes", "bytes of models sent so far", labels=[*RUN, "direction"]
        )
        for direction in ("down", "up"):
            sent.add_metric([*which(run), direction], run[f"bytes_{direction}"])
        yield sent
        for key, about in OF_CURRENT.items():
            yield gauge(about, RUN, [(which(run), run[key])])
        parts = [
            ([*which(run), silo["name"], p], silo[p])
            for silo in run["silos"]
            for p in ("validation", "test")
        ]
        yield gauge(
            ("silofl_silo_score", "last score of a silo's part"), [*RUN, "silo", "part"], parts
        )
        silos = [{**silo, **flags(silo)} for silo in run["silos"]]
        for key, about in OF_SILOS.items():
            yield gauge(
                about,
                [*RUN, "silo"],
                [([*which(run), silo["name"]], silo[key]) for silo in silos],
            )


def gauge(about: tuple[str, str], labels: Sequence[str], samples: Samples) -> Metric:
    family = GaugeMetricFamily(*about, labels=labels)
    for values, value in samples:
        if value is not None:
            family.add_metric(values, float(value))
    return family


def flags(silo: Mapping[str, Any]) -> dict[str, bool]:
    doing = silo["doing"]
    return {
        "waits": doing != "",
        "is_late": doing == "late",
        "is_left_out": silo["left_out"] != "",
    }


def which(run: Mapping[str, Any]) -> list[str]:
    return [run["strategy"], str(run["seed"])]
