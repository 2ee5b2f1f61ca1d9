"""Evidence of a network on one set of samples."""

from __future__ import annotations

from typing import Any

import numpy as np

from models.evidence.measure import Ask, evidence_of


def evidence(task: Any, model: Any, samples: Any, units: Any = None, **ask: Any) -> Any:
    """Units are samples, unless they are given."""
    units = np.arange(len(samples)) if units is None else units
    return evidence_of(task, model, samples, samples, units, Ask(**ask))
