"""What protects a silo's records beside the noise: checks, and the rules for releasing sums of a table's columns.

Under a study, the statistics that standardise a table are checked, too. Every message brings them, and the server
chooses them. A malicious server could use them to isolate a patient: with a column's mean just below its greatest
value, and a tiny deviation, the seed's own first layer becomes a filter. That patient's gradient is then alone in half
of the units; another column isolates another patient in the next round. So the statistics must stay the same for the
whole run, and must not move this silo's values far from where honest ones do. The server keeps one choice per run.

Honest statistics are the pooled mean and variance. With them, each standardised column of a silo with the share p of
all samples has a root mean square of at most 1 / sqrt(p).
"""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from client.local_data import agreed_schema, columns_in
from client.protocol.policy import Policy, PolicyRefusedError
from client.protocol.study import StudyProtocol
from client.site.record import Record, disclose
from models.privacy.noise import derive_key
from models.samples import Samples
from models.shapes import columns as table_columns
from models.shapes import write_shape
from models.standardisation import Columns, column_sums, deviation, rounded_sums
from partitions.common.errors import UserError
from partitions.splits import Array, SiloData, Split
from partitions.stored import sample_digests
from strategies.base.run_settings import RunSettings
from strategies.base.transport.data_summary import reorder_columns
from strategies.base.transport.reporting import SCHEMA, SUMS


def check_floor(name: str, part: Split, people: int, policy: Policy, *, sends: bool) -> None:
    """Raise PolicyRefusedError if there are too few samples to train with, or patients for what a run ``sends``.

    ``part``: the training part. ``floor`` counts ``people`` (``SiloData.measured``); ``min-batch-size`` counts samples.
    """
    fault = too_few(people, policy, "floor") if sends else ""
    if not fault and len(part) < policy.min_batch_size:
        fault = f"its policy has {policy.line('min_batch_size')}, its training part has fewer samples"
    if fault:
        raise PolicyRefusedError(f"{name} refuses: {fault}")


def too_few(people: int, policy: Policy, rule: str) -> str:
    """Return why a training part has too few patients for ``rule`` (samples, if it names no patients); empty: enough.

    The text is sent to the server, so it contains no number of the silo's.
    """
    if people >= getattr(policy, rule):
        return ""
    return f"its policy has {policy.line(rule)}, its training part has fewer patients"


def check_records(settings: RunSettings, data: SiloData, name: str) -> None:
    """Raise UserError if, with ``dp = true``, something would be computed from the records without noise."""
    s = settings.privacy
    normalization = settings.common.normalization
    if s is None:
        return
    if columns_in(data) is not None and normalization != "none":
        raise UserError(
            f"dp = true: not with normalization = {normalization}, whose means and deviations "
            "are the records' own; scale tables and measurements by fixed ranges, and take normalization = none"
        )
    if data.task == "survival":
        raise UserError(
            "dp = true: not for survival: Cox's loss is no sum over records, each needs the others"
        )
    if s.unit == "patient" and data.train.patient is None:
        raise UserError(
            f"dp.unit = patient: {name}'s training samples name no patients; `silofl import` notes them, or "
            "take dp.unit = record"
        )


# Statistics of tables


LARGEST = 10.0  # root mean square of a standardised column: the bound for a silo with 1 % of all samples


def check_statistics(
    columns: Array,
    mean: Columns,
    std: Columns,
    study: StudyProtocol,
    silo: str,
    state: str,
    run_id: int,
) -> None:
    """Raise PolicyRefusedError if the server's ``mean`` and ``std`` (d,) do not fit data like ``columns``.

    ``columns`` (n, d): the silo's training part. They are noted first (:func:`claim_statistics`).
    """
    refuses = f"{silo} refuses: under the study {study.name} tables are standardised by all hospitals' statistics"
    if not len(mean) == len(std) == columns.shape[1]:
        raise PolicyRefusedError(
            f"{refuses}, and the message has {len(mean)} means for {columns.shape[1]} columns"
        )
    claim_statistics(mean, std, silo, state, run_id)
    with np.errstate(all="ignore"):
        standardised = (columns.astype(np.float64) - np.array(mean)) / np.array(std)
        size = np.sqrt((standardised * standardised).mean(0))
    far = ~(size <= LARGEST)
    if far.any():
        column = int(far.argmax())
        raise PolicyRefusedError(
            f"{refuses}: with the message's, column {column + 1} has a root mean square above {LARGEST:g} here"
        )


def claim_statistics(mean: Columns, std: Columns, silo: str, state: str, run_id: int) -> None:
    """Note a run's statistics in the state directory. Raises PolicyRefusedError if the run had other ones before.

    Empty ones: the silo's own.
    """
    digest = derive_key(b"", "statistics", repr(mean), repr(std)).hex()
    what = "the run has standardised tables by other statistics before"
    claim_choice("statistics", digest, silo, state, str(run_id), what)


def claim_model(digest: str, silo: str, state: str, run_id: int, this: int) -> None:
    """Note the model of a round that is to be trained. Raises PolicyRefusedError if the round had another one before.

    For a refusal says how far the model is from the silo's own one: each would tell more of it (the study's ``step``).
    """
    what = f"round {this} has come with another model before"
    claim_choice("model", digest, silo, state, f"{run_id} {this}", what)


def claim_choice(kind: str, choice: str, silo: str, state: str, run: str, what: str) -> None:
    """Note the server's choice before the silo's records answer to it; ``run``: within which there is one.

    Raises PolicyRefusedError, with the text ``what``, if there was another choice before.
    """
    if not state:
        raise PolicyRefusedError(
            f"{silo} refuses: it has no state-dir to remember what it was sent"
        )
    find = "SELECT question FROM disclosed WHERE kind = ? AND silo = ? AND run = ?"
    with Record(Path(state)).write() as db:
        before = {question for (question,) in db.execute(find, (kind, silo, run))}
        if before - {choice}:
            raise PolicyRefusedError(f"{silo} refuses: {what}")
        if not before:
            disclose(db, kind, silo=silo, run=run, question=choice)


# Sums of a table's columns, from which all silos agree on a standardisation. Sums cover enough patients, are rounded
# (``models.standardisation.rounded_sums``), and are released once per version of the training part. The record stores
# what was released; while the samples are the same, so are the numbers. The difference of two versions that differ in
# too few patients would reveal those few, so the later version has to wait until enough have changed. If no sums are
# released, the reason is sent instead. The silo is then standardised by its own statistics, as with
# ``normalization = "silo"``. If a file names no patients, each sample counts as one.


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
    if fault := too_few(part.people, policy, rule):
        return None, fault
    if not state:
        return None, "it has no state-dir to remember what it gave"
    try:
        with Record(Path(state)).write() as db:
            return _release(x, part.units, policy, rule, db)
    # The record is unreadable: release nothing more
    except (OSError, ValueError, KeyError, TypeError) as error:
        return None, f"what it gave before cannot be remembered ({error})"


def _release(
    x: Array, units: Array, policy: Policy, rule: str, db: sqlite3.Connection
) -> tuple[Sums | None, str]:
    digests = sample_digests(x)
    _, patients, records = np.unique(units, return_inverse=True, return_counts=True)
    order = np.argsort(digests, kind="stable")
    samples = [f"{digest:016x}" for digest in digests[order].tolist()]
    earlier = db.execute("SELECT people, answer FROM disclosed WHERE kind = ?", (KIND,))
    for people, text in earlier.fetchall():
        release = json.loads(text)
        if people.split() == samples:
            return (release["sum"], release["square_sum"]), ""
        before = np.array([int(digest, 16) for digest in people.split()], np.uint64)
        came = np.unique(patients[~np.isin(digests, before)])
        # Earlier versions noted no patients: the number that left is then unknown, and counts as zero.
        theirs = np.array(release.get("patients", np.zeros(len(before))))
        gone = np.unique(theirs[~np.isin(before, digests)])
        if max(len(came), len(gone)) < getattr(policy, rule):
            few = "fewer patients differ from those it gave sums of before"
            return None, f"its policy has {policy.line(rule)}, and {few}"
    sums = rounded_sums(x, int(records.max()))
    answer = {"patients": patients[order].tolist(), "sum": sums[0], "square_sum": sums[1]}
    disclose(db, KIND, answer=json.dumps(answer), people=samples)
    return sums, ""


# Mean and deviation of each channel of the inputs, for methods that send them: of released sums, and of nothing
# else. Of a table these are the sums of its columns, so that one release serves both. Of pictures and volumes they are
# those of each sample's mean and root mean square in each channel.


def channel_moments(samples: Samples) -> Array:
    """Return each sample's mean and root mean square of each channel (n, 2 C), float64."""
    moments_of = []
    for x, _ in samples.batches(samples.in_order()):
        values = x.cpu().double().flatten(2)
        moments_of.append(torch.cat([values.mean(2), values.square().mean(2).sqrt()], 1))
    moments: Array = torch.cat(moments_of).numpy()
    return moments


def released_moments(session: Any) -> Tensor:
    """Return mean and deviation of each channel (2, C) of a session's inputs, as standardised.

    With statistics of the silo's own they are 0 and 1, and nothing is released. Raises PolicyRefusedError if the policy
    releases no sums.
    """
    data, channels = session.data, table_columns(session.own_data.input_shape)
    columns, (mean, std) = columns_in(data), session.statistics[0]
    alone = session.name in session.config.get("own_statistics", ())
    if columns is not None and (alone or session.settings.common.normalization == "silo"):
        return torch.eye(2)[1:].T.repeat(1, channels).to(session.device)
    x = channel_moments(session.silo.train) if columns is None else columns
    sums, reason = released_sums(x, data.train, session.policy, session.state_dir)
    if sums is None:
        raise PolicyRefusedError(
            f"{session.name} refuses: {reason}, and {session.info.name} sends sums of columns"
        )
    if columns is None:
        parts = [sums[0][: len(sums[0]) // 2], sums[1][len(sums[1]) // 2 :]]
    else:
        summary = {
            "shape": write_shape(data.input_shape),
            "task": data.task,
            "classes": data.classes,
        }
        here = dict(zip(SUMS, sums, strict=True)) | {SCHEMA: data.schema.text}
        agreed = reorder_columns(summary | here, agreed_schema(session.config))
        parts = [agreed[key][:channels] for key in SUMS]
    middle, square = torch.tensor(parts, dtype=torch.float64) / len(data.train)
    spread = deviation(square - middle.square(), square)
    if mean:
        scale = torch.tensor([mean, std], dtype=torch.float64)
        middle, spread = (middle - scale[0]) / scale[1], spread / scale[1]
    return torch.stack([middle, spread]).float().to(session.device)
