"""The sums of a table's columns, from which all silos agree on a standardisation, and the rules for releasing them.

Sums cover enough patients, are rounded (`models.standardisation.rounded_sums`), and are released once per version of
the training part. The record stores what was released; while the samples are the same, so are the numbers.
The difference of two versions that differ in too few patients would reveal those few, so the later version has to wait
until enough have changed. If no sums are released, the reason is sent instead. The silo is then standardised by its own
statistics, as with ``normalization = "silo"``. If a file names no patients, each sample counts as one.
"""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import numpy as np

from client.privacy.checks import too_few
from client.site.record import Record, disclose
from client.site.trust.policy import Policy
from models.standardisation import column_sums, rounded_sums
from partitions.site_split import sample_digests
from partitions.splits import Array, Split

KIND = "sums"  # of the rows of `disclosed` in the record
Sums = tuple[list[float], list[float]]


def released_sums(x: Array, part: Split, policy: Policy, state: str) -> tuple[Sums | None, str]:
    """Return the sum and sum of squares of the training columns ``x`` (n, d), or None and the reason.

    ``state``: the state directory. The reason is sent to the server, so it does not contain the number of patients.
    """
    if policy.public:
        return column_sums(x), ""
    rule = "floor" if policy.floor > policy.min_sum_samples else "min_sum_samples"
    if not policy.sums:
        return None, f"its policy has {policy.line('sums')}"
    if fault := too_few(part, policy, rule):
        return None, fault
    if not state:
        return None, "it has no state-dir to remember what it gave"
    try:
        with Record(Path(state)).writing() as db:
            return _release(x, part.units, policy, rule, db)
    except (OSError, ValueError, KeyError, TypeError) as error:  # the record is unreadable: release nothing more
        return None, f"what it gave before cannot be remembered ({error})"


def _release(x: Array, units: Array, policy: Policy, rule: str, db: sqlite3.Connection) -> tuple[Sums | None, str]:
    digests, (_, patients, records) = sample_digests(x), np.unique(units, return_inverse=True, return_counts=True)
    order = np.argsort(digests, kind="stable")
    samples = [f"{digest:016x}" for digest in digests[order].tolist()]
    for people, text in db.execute("SELECT people, answer FROM disclosed WHERE kind = ?", (KIND,)).fetchall():
        release = json.loads(text)
        if people.split() == samples:
            return (release["sum"], release["square_sum"]), ""
        before = np.array([int(digest, 16) for digest in people.split()], np.uint64)
        came = np.unique(patients[~np.isin(digests, before)])
        # Earlier versions noted no patients: the number that left is then unknown, and counts as zero.
        gone = np.unique(np.array(release.get("patients", np.zeros(len(before))))[~np.isin(before, digests)])
        if max(len(came), len(gone)) < getattr(policy, rule):
            rule_line = policy.line(rule)
            return None, f"its policy has {rule_line}, and fewer patients differ from those it gave sums of before"
    sums = rounded_sums(x, int(records.max()))
    answer = json.dumps({"patients": patients[order].tolist(), "sum": sums[0], "square_sum": sums[1]})
    disclose(db, KIND, answer=answer, people=samples)
    return sums, ""
