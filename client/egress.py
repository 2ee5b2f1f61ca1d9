"""Everything that leaves a silo: the data summary by :func:`release_summary`, replies by :func:`release`.

A reply contains arrays (as integers with ``secure-aggregation``) and numbers that have a kind
(``strategies/base/transport/kinds.py``), sample counts, and metrics and seconds on the list in
``strategies/base/transport/reporting.py``.
Evidence leaves once per run, by
:func:`release_evidence`; so does the silo's own model, by :func:`release_own_model`. A survey of the data leaves by
:func:`release_survey`. Everything that left is logged. What the rules withheld is reported only to the site's own
process, for its audit log (``client/site/release.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from logging import INFO
from typing import cast

import torch
from flwr.app import ConfigRecord, MetricRecord, RecordDict
from flwr.common import log
from torch import Tensor

from client.protocol.policy import SCORE, Policy, PolicyRefusedError, key_of
from client.site.release import RECORD, site_takes
from models.evidence.measure import Evidence
from models.tasks import ENDS
from partitions.common.errors import UserError
from partitions.common.messages import INTEGERS, MASKED
from partitions.schema import read_schema
from strategies.base.aggregation.spread import spread
from strategies.base.client import SiloClient
from strategies.base.evaluation import OWN
from strategies.base.evidence import evidence_kind, fewest
from strategies.base.state import BUFFERS
from strategies.base.survey import RECORD as SURVEY_RECORD
from strategies.base.survey import Answer, written_answer
from strategies.base.transport.payload import Model, Number, Payload, Wire, array_record, encode
from strategies.base.transport.reporting import (
    COLUMNS,
    PRIVACY,
    SCHEMA,
    SECONDS,
    SUMMARY,
    SUMS,
    WITHHELD,
    allowed_metrics,
)


def release_summary(summary: Mapping[str, Number]) -> RecordDict:
    """Return the content of the reply to a query. Raises UserError for an entry that is not on the list."""
    unknown = sorted(set(summary) - set(SUMMARY))
    if unknown:
        raise UserError(
            f"{', '.join(unknown)}: not on the list of what a data summary may tell"
        )
    shown = {
        name: f"of {len(cast(list[float], v))} columns" if name in SUMS else v
        for name, v in summary.items()
    }
    if SCHEMA in summary:
        schema = read_schema(str(summary[SCHEMA]))
        with_settings = f"made with {schema.made_with}, " * bool(schema.inputs)
        shown[SCHEMA] = (
            f"{len(schema.features)} columns, {len(schema.labels)} labels, {with_settings}"
            f"SHA-256 {schema.digest[:16]}"
        )
    shown |= {COLUMNS: "stated"} if COLUMNS in summary else {}
    log(INFO, "%s sent its data summary: %s", summary["name"], shown)
    records = RecordDict({"summary": ConfigRecord({**summary})})
    tell_site(records, {"sums": [str(summary[WITHHELD])]} if WITHHELD in summary else {})
    return records


def tell_site(records: RecordDict, withheld: Mapping[str, Collection[str]]) -> None:
    """Add what was withheld, by rule; the site's process removes it from the reply. Skipped in a simulation."""
    if site_takes():
        records[RECORD] = ConfigRecord(
            {rule: sorted(items) for rule, items in withheld.items()}
        )


def sift_metrics(
    metrics: Mapping[str, float],
    counts: Mapping[str, int],
    least: float,
    released: Collection[str],
) -> tuple[dict[str, float], dict[str, set[str]]]:
    """Return the metrics that may leave, and the withheld metrics or splits by rule.

    ``counts``: patients by split; ``least``: the fewest behind a metric; ``released``: the metrics that may leave.
    Raises UserError for a metric that is on no list.
    """
    kept: dict[str, float] = {}
    few = key_of("min_metric_samples")
    metric_rule = key_of("metrics")
    withheld: dict[str, set[str]] = {few: set(), metric_rule: set()}
    for name, value in metrics.items():
        if name not in allowed_metrics():
            raise UserError(f"metric '{name}' is not on the list of what may leave a silo")
        if name in (*SECONDS, *PRIVACY):
            kept[name] = float(value)
            continue
        snapshot, split, metric = name.split(".")
        if metric not in released:
            withheld[metric_rule].add(metric)
        elif counts[split] < least:
            withheld[few].add(f"{snapshot}.{split}")
        else:
            kept[name] = float(value)
    return kept, {rule: items for rule, items in withheld.items() if items}


def sift_reply(
    client: SiloClient,
    vectors: Sequence[Tensor],
    metrics: Mapping[str, float],
    counts: Mapping[str, int],
    least: float,
    policy: Policy,
) -> tuple[dict[str, float], dict[str, set[str]]]:
    """Return the metrics of a reply that may leave, and all that the policy withholds from it, by rule."""
    leaving = set(policy.metrics)
    if SCORE in leaving:
        leaving |= {client.silo.task.score, *ENDS}
    kept, withheld = sift_metrics(metrics, counts, least, leaving)
    for name in client.upload_names() if vectors and client.privacy is None else ():
        for rule, items in client.info.kinds[name].withheld(client.silo).items():
            withheld.setdefault(rule, set()).update(items)
    return kept, withheld


def check_sent(client: SiloClient, vectors: Sequence[Tensor], policy: Policy) -> None:
    """Raise PolicyRefusedError for more than the silo's policy allows, UserError for what is of no kind."""
    size, kinds = client.model.layout.size, client.info.kinds
    names = client.upload_names() if vectors else ()
    for name, vector in zip(names, vectors, strict=True):
        if name not in kinds:
            raise UserError(f"{type(client).__name__} may not send '{name}': it has no kind")
        share = kinds[name].whole_from
        if not policy.whole_model and vector.numel() >= share * size:
            most = f": {share:.0%} count as all" if share < 1 else ""
            raise PolicyRefusedError(
                f"{client.silo.name} refuses: its policy has {policy.line('whole_model')}, the run strategy = "
                f"{client.common.strategy}, which would send {vector.numel()} numbers of a model of {size}{most}"
            )
        kinds[name].check(name, vector, client)
    for name, number in client.replies.items():
        if name not in client.info.sends_numbers:
            raise UserError(f"{type(client).__name__} may not send '{name}': it has no kind")
        client.info.sends_numbers[name].check(name, number, client)


def release(
    client: SiloClient,
    vectors: Sequence[Tensor],
    metrics: Mapping[str, float],
    counts: Mapping[str, int],
    *,
    min_samples: float,
    policy: Policy,
) -> RecordDict:
    """Return the content of a silo's reply: what the run needs, as far as the silo's policy allows.

    ``counts``: how many patients each split has, or samples where the data name no patients.
    Raises UserError if a method tries to send what it has not declared, or what the policy does not allow.
    """
    check_sent(client, vectors, policy)
    integers = client.integers
    names = client.upload_names() if vectors and integers is None else ()
    models = {
        name: Model(vector, client.silo.name, client.round, len(client.silo.train))
        for name, vector in zip(names, vectors, strict=integers is None)
    }
    config: dict[str, Number] = {
        "round": client.round,
        "silo": client.silo.name,
        "samples": len(client.silo.train),
    }
    wire = Wire(client.common.wire_dtype)
    records = encode(Payload(models, client.replies), config, wire, client.encoded)
    if integers is not None:
        records[MASKED] = array_record({INTEGERS: integers.view(torch.uint32)})
    least = max(min_samples, policy.min_metric_samples)
    kept, withheld = sift_reply(client, vectors, metrics, counts, least, policy)
    tell_site(records, withheld)
    records["metrics"] = MetricRecord({**kept})
    size: dict[str, int | str] = {name: m.vector.numel() for name, m in models.items()}
    size |= {} if integers is None else {INTEGERS: f"{integers.numel()} integers"}
    size |= {
        name: f"{size[name]} as {c.dtype} {c.form} in {c.bytes} bytes"
        for name, c in client.encoded.items()
    }
    what = f"vectors {size}, numbers {dict(client.replies)}, metrics {sorted(kept)}"
    log(INFO, "%s round %d sent: %s", client.silo.name, client.round, what)
    return records


def release_own_model(client: SiloClient) -> RecordDict:
    """Return the content of the reply with the silo's own model, which the client's network holds, unchanged."""
    silo = client.silo.name
    model = client.model
    tensors = {
        OWN: model.vector.clone(),
        **({BUFFERS: model.buffers.clone()} if model.buffers.numel() else {}),
    }
    log(
        INFO,
        "%s sent its own model: %s numbers",
        silo,
        sum(vector.numel() for vector in tensors.values()),
    )
    models = {name: Model(vector, silo, client.round) for name, vector in tensors.items()}
    records = encode(Payload(models), {"round": client.round, "silo": silo})
    tell_site(records, {})
    return records


def release_survey(
    silo: str, answer: Answer, withheld: Mapping[str, Collection[str]]
) -> RecordDict:
    """Return the content of the reply to a survey. ``withheld``: what stays, by rule, for the audit log."""
    shown = [*answer["columns"], *answer["labels"]]
    log(
        INFO,
        "%s sent a survey of %s",
        silo,
        ", ".join(shown) or "nothing but its number of samples",
    )
    records = RecordDict({SURVEY_RECORD: written_answer(answer)})
    tell_site(records, withheld)
    return records


def release_evidence(
    client: SiloClient,
    values: Evidence,
    people: int,
    *,
    min_samples: int,
    policy: Policy,
    suppressed: Sequence[str] = (),
) -> RecordDict:
    """Return the content of the reply with evidence: what the silo's policy allows, over enough patients.

    ``people``: patients in the test part. Smaller groups were checked when their values were computed
    (``models/evidence/``). ``suppressed``: names of subgroups that are withheld, without counts, for the site's audit
    log. Raises UserError for a value that is not on the list (``strategies/base/evidence.py``).
    """
    least = max(min_samples, policy.min_metric_samples)
    kept = Evidence()
    rule, few = key_of("metrics"), key_of("min_metric_samples")
    withheld: dict[str, set[str]] = {few: set(suppressed)} if suppressed else {}
    for name, value in values.items():
        if not (kind := evidence_kind(name)):
            raise UserError(f"evidence '{name}' is not on the list of what may leave a silo")
        if kind not in policy.metrics:
            withheld.setdefault(rule, set()).add(kind)
        elif min(people, fewest(name, value)) < least:
            withheld.setdefault(few, set()).add(kind)
        else:
            kept[name] = value
    log(INFO, "%s sent its evidence: %s", client.silo.name, dict(kept) or "none")
    config: dict[str, Number] = {"round": client.round, "silo": client.silo.name}
    records = encode(Payload(), config)
    tell_site(records, withheld)
    records["metrics"] = MetricRecord(dict(kept))
    return records


def release_sum(
    silo: str, numbers: Sequence[float], withheld: Mapping[str, Collection[str]]
) -> RecordDict:
    """Return the content of the reply to a survey under masks: integers, to which the site's process adds the masks."""
    log(INFO, "%s sent a survey of %d numbers for a sum", silo, len(numbers))
    integers = spread(torch.tensor(numbers, dtype=torch.float64))
    records = RecordDict({MASKED: array_record({INTEGERS: integers.view(torch.uint32)})})
    tell_site(records, withheld)
    return records
