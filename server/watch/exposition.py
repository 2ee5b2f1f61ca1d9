"""Metrics of a picture in Prometheus's text format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE
from prometheus_client.registry import Collector

__all__ = ["CONTENT_TYPE", "exposition"]

STATES = ("waiting", "running", "done", "failed")
RUN = ["strategy", "seed"]


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
        readable = GaugeMetricFamily("silofl_source_readable", "1 while the run's progress.jsonl can be read")
        readable.add_metric([], 0 if self.picture["fault"] else 1)
        yield readable
        yield from self._runs()
        if self.picture["run"] is not None:
            yield from self._current(self.picture["run"])
            yield from self._silos(self.picture["run"])

    def _runs(self) -> Iterator[Metric]:
        state = GaugeMetricFamily("silofl_run_state", "1 for the state that a run is in", labels=[*RUN, "state"])
        kinds = {
            "round": ("silofl_run_rounds_done", "rounds that are done"),
            "rounds": ("silofl_run_rounds_planned", "rounds that are planned"),
            "best_round": ("silofl_run_best_round", "round with the best mean validation score so far"),
            "best_validation": ("silofl_run_best_validation_score", "mean validation score of that round"),
            "best_test": ("silofl_run_best_test_score", "mean test score of that round"),
            "gain": ("silofl_run_gain_over_local", "mean gain over a finished run of the method local, same seed"),
        }
        found = {key: GaugeMetricFamily(name, help, labels=RUN) for key, (name, help) in kinds.items()}
        for run in self.picture["runs"]:
            for name in STATES:
                state.add_metric([*which(run), name], float(run["state"] == name))
            for key, family in found.items():
                if run[key] is not None:
                    family.add_metric(which(run), run[key])
        yield state
        yield from found.values()

    def _current(self, run: Mapping[str, Any]) -> Iterator[Metric]:
        sent = CounterMetricFamily("silofl_payload_bytes", "bytes of models sent so far", labels=[*RUN, "direction"])
        for direction in ("down", "up"):
            sent.add_metric([*which(run), direction], run[f"bytes_{direction}"])
        yield sent
        kinds = {
            "took": ("silofl_elapsed_seconds", "seconds of all rounds so far"),
            "pace": ("silofl_round_seconds", "mean seconds of the last rounds"),
            "left": ("silofl_remaining_seconds", "estimated seconds to the end"),
        }
        for key, (name, help) in kinds.items():
            if run[key] is not None:
                family = GaugeMetricFamily(name, help, labels=RUN)
                family.add_metric(which(run), run[key])
                yield family

    def _silos(self, run: Mapping[str, Any]) -> Iterator[Metric]:
        score = GaugeMetricFamily("silofl_silo_score", "last score of a silo's part", labels=[*RUN, "silo", "part"])
        kinds = {
            "waits": ("silofl_silo_asked", "1 while the silo's reply is awaited"),
            "is_late": ("silofl_silo_late", "1 while the silo is late"),
            "is_left_out": ("silofl_silo_left_out", "1 if the last round went on without the silo"),
            "missed": ("silofl_silo_rounds_missed", "rounds that went on without the silo"),
            "seconds": ("silofl_silo_reply_seconds", "seconds that the silo's last reply took"),
            "gain": ("silofl_silo_gain_over_local", "test score minus that of a finished run of local, same seed"),
            "epsilon": ("silofl_silo_epsilon", "privacy budget that the silo has spent, where it reports it"),
        }
        found = {k: GaugeMetricFamily(name, help, labels=[*RUN, "silo"]) for k, (name, help) in kinds.items()}
        for silo in run["silos"]:
            labels = [*which(run), silo["name"]]
            doing, out = silo["doing"], bool(silo["left_out"])
            values = {**silo, "waits": bool(doing), "is_late": doing == "late", "is_left_out": out}
            for key, family in found.items():
                if (value := values[key]) is not None:
                    family.add_metric(labels, float(value))
            for part in ("validation", "test"):
                if silo[part] is not None:
                    score.add_metric([*labels, part], silo[part])
        yield score
        yield from found.values()


def which(run: Mapping[str, Any]) -> list[str]:
    return [run["strategy"], str(run["seed"])]
