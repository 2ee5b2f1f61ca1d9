"""Evidence in a study's summary: the values of each silo and method, and the values over silos."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

from models.evidence.measure import CALIBRATION, MEASUREMENT, PREFIX
from server.report.scores import NAN, known
from server.report.study import Study
from strategies import strategies
from strategies.base.evaluation import sends_own_model
from strategies.base.evidence import split_name


def value(study: Study, method: str, silo: str, key: str) -> float:
    """Return a value of a silo's evidence, mean over seeds; ``nan`` if no seed has it."""
    each = [r["per_silo"].get(silo, {}) for r in study.of(method)]
    found = [known(values.get(key, values.get("evidence", {}).get(key))) for values in each]
    found = [v for v in found if not math.isnan(v)]
    return statistics.fmean(found) if found else NAN


def lists(study: Study, method: str, silo: str) -> Mapping[str, Any]:
    """Return a silo's lists (bins, net benefit, sets) from the first seed that has any."""
    each = (r["per_silo"].get(silo, {}).get("evidence") for r in study.of(method))
    return next((found for found in each if found), {})


def measurements_of(study: Study) -> list[str]:
    """Return the key prefix of each measurement's values; ``[""]`` for a single measurement."""
    found = [key for r in study.runs for v in r["per_silo"].values() for key in v.get("evidence", {})]
    return list(dict.fromkeys(f"{MEASUREMENT}{name}." for key in found if (name := split_name(key)[0]))) or [""]


def over_silos(study: Study, method: str, key: str) -> dict[str, float]:
    """Return a value of the evidence by silo, for the silos that have it."""
    found = {silo: value(study, method, silo, key) for silo in study.silos}
    return {silo: v for silo, v in found.items() if not math.isnan(v)}


def evidence_that_left(study: Study) -> list[str]:
    """Return the names of the evidence that silos have sent; subgroups, which silos name, are one entry."""
    names = {key for r in study.runs for v in r["per_silo"].values() for key in v.get("evidence", {})}
    names |= {key for key in CALIBRATION for m in study.methods if over_silos(study, m, key)}
    return sorted({"subgroups" if name.startswith(PREFIX) else split_name(name)[1] for name in names})


def own_models_that_left(study: Study) -> dict[str, list[str]]:
    """Return for each method whose runs request silos' own models (keep-models) the silos that have sent theirs."""
    known, asks = strategies(), study.config.get("keep-models") == "reported"
    methods = [m for m in study.methods if asks and m in known and sends_own_model(known[m].info)]
    sent = [event for event in study.events if event.get("event") == "models"]
    return {m: sorted({silo for e in sent if e["strategy"] == m for silo in e["silos"]}) for m in methods}


def has_evidence(study: Study) -> bool:
    """Return whether any silo has sent evidence."""
    return bool(evidence_that_left(study))
