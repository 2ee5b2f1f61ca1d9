"""The sums of a table's columns: what a hospital gives for a standardisation that all silos agree on, and when.

Over enough samples only, rounded (`models.standardisation.rounded_sums`), and once per version of the training part:
the state directory remembers what was given, and as long as the samples are the same so are the numbers.
Two versions that differ in fewer samples than sums need would tell, by their difference, of those few: the later one
waits until enough have changed. Where no sums are given the reason goes in their place; the silo is then standardised
by its own statistics, as with ``normalization = "silo"``.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

from client.site.trust.policy import Policy
from models.standardisation import column_sums, rounded_sums
from partitions.common.files import locked, write_atomically
from partitions.site_split import sample_digests
from partitions.splits import Array

FILE = "released-sums.json"
Sums = tuple[list[float], list[float]]


def released_sums(x: Array, policy: Policy, state: str) -> tuple[Sums | None, str]:
    """Sum and sum of squares of the columns of ``x`` (n, d), or None and why not. ``state``: the state directory."""
    if policy.public:
        return column_sums(x), ""
    rule = "floor" if policy.floor > policy.min_sum_samples else "min_sum_samples"
    if not policy.sums:
        return None, f"its policy has {policy.says('sums')}"
    if len(x) < getattr(policy, rule):
        return None, f"its policy has {policy.says(rule)}, it has {len(x)} training samples"
    if not state:
        return None, "it has no state-dir to remember what it gave"
    file = Path(state) / FILE
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with locked(file.with_suffix(".lock"), "another process of this silo is at its sums"):
            return _release(x, policy, rule, file)
    except (OSError, ValueError, KeyError, TypeError) as error:  # what it gave cannot be read: nothing more is given
        return None, f"what it gave before cannot be remembered ({FILE}: {type(error).__name__})"


def _release(x: Array, policy: Policy, rule: str, file: Path) -> tuple[Sums | None, str]:
    given: list[dict[str, Any]] = json.loads(file.read_text()) if file.exists() else []
    samples = Counter(f"{digest:016x}" for digest in sample_digests(x).tolist())
    for release in given:
        before = Counter(release["samples"])
        changed = ((samples - before) + (before - samples)).total()
        if not changed:
            return (release["sum"], release["square_sum"]), ""
        if changed < getattr(policy, rule):
            told = policy.says(rule)
            return None, f"its policy has {told}, and {changed} samples differ from those it gave sums of before"
    sums = rounded_sums(x)
    day = time.strftime("%Y-%m-%d", time.gmtime())
    given.append({"day": day, "samples": sorted(samples.elements()), "sum": sums[0], "square_sum": sums[1]})
    write_atomically(file, json.dumps(given), mode=0o600)
    return sums, ""
