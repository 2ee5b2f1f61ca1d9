"""The bytes that a silo's replies have at most, from the network and what the method sends: for a study's limit.

They count as the hospital counts them (``client/site/release.py``): arrays with their headers, records as JSON.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from models.shapes import columns
from partitions.common.names import silo_name
from partitions.labels import TASKS
from partitions.patients import MOST_GROUPS
from partitions.schema import NO_SCHEMA, Schema
from server.results.study import run_network, start_strategy
from strategies.base.evaluation import asks_for_models
from strategies.base.plan import OFFLINE, SiloInfo
from strategies.base.run_settings import RunSettings
from strategies.base.settings.training import seen_shape
from strategies.base.state import BUFFERS
from strategies.base.strategy import PersonalizedStrategy
from strategies.base.transport.codecs import narrow, write_change
from strategies.base.transport.data_summary import declared_spec, read_agreed, read_data_spec
from strategies.base.transport.error_feedback import base_of, sends_changes
from strategies.base.transport.payload import Wire

ARRAY = 150  # bytes of an array's header; as much again is its entry in the manifest
NUMBER = 40  # of a number in JSON, or of a silo's name
TEXT = 4096  # of a reply's metrics and other numbers
COLUMN = 200  # of a column or label in an unknown schema
GROUP = 250  # of a subgroup's evidence
STATEMENT = 640  # of a silo's key, and of its sealed share, in a masked round
MEASUREMENT = 3072  # of a measurement's evidence


@dataclass(frozen=True)
class ReplySizes:
    """Bytes of one silo's largest replies, by the kind of the message."""

    train: int
    evaluate: int
    query: int


def declared_data(agreed: str, schema: Schema = NO_SCHEMA) -> dict[str, Any]:
    """Return the values of a ``DataSpec`` that the setting ``agreed`` fixes, or this schema. Raises UserError."""
    fixed = read_data_spec(declared_spec(read_agreed(agreed)))
    content = schema if schema.content else fixed.get("declared", NO_SCHEMA)
    if content.labels:
        fixed["classes"] = len(content.labels)
    if content.features:
        fixed.setdefault("shape", (len(content.features),))
    return fixed | {"declared": content}


def reply_sizes(run: RunSettings, data: Mapping[str, Any], silos: int) -> ReplySizes | None:
    """Return the sizes of a run's replies; None if ``data`` lacks shape or classes. Raises UserError for a misfit.

    ``silos``: how many there are, for what they say to each other in masked rounds.
    """
    if "shape" not in data or "classes" not in data:
        return None
    common, info, classes = run.common, run.strategy.info, data["classes"]
    task = data.get("task", TASKS[0])
    shape = seen_shape(common, data["shape"], task)
    model = run_network(run, shape, classes, task)
    masked = (3 + silos) * STATEMENT if common.secure_aggregation else 0
    listed = len(info.sends_numbers) * (len(model.layout.parameters) + silos)
    text = TEXT + NUMBER * listed
    train = text + masked
    if info.trains:
        here = [
            SiloInfo(silo_name(i), OFFLINE, 1, 1, 1) for i in range(max(3, common.secure_group))
        ]
        logging.disable(logging.WARNING)  # the run itself logs them
        try:
            strategy = start_strategy(run, model, here, lambda purpose: model.vector)
        finally:
            logging.disable(logging.NOTSET)
        train += vector_bytes(strategy, here[0].name)
    measurements = classes if task == "regression" else 1
    evidence = MOST_GROUPS * GROUP + measurements * MEASUREMENT
    own_model = 4 * (model.layout.size + model.layout.buffer_size) + 4 * ARRAY
    evaluate = text + max(evidence, own_model * asks_for_models(info, common))
    sums, declared = columns(data["shape"]) + classes, data.get("declared", NO_SCHEMA)
    schema = 2 * len(declared.text) if declared.content else COLUMN * sums
    return ReplySizes(train, evaluate, max(TEXT + schema + 2 * NUMBER * sums, masked))


def vector_bytes(strategy: PersonalizedStrategy, silo: str) -> int:
    """Return the bytes of the vectors that a silo uploads at most in a round."""
    strategy.start_round(1)
    strategy.begin_round()
    common = strategy.common
    received = strategy.payload(silo).models
    whole = narrow(torch.zeros(1), Wire(common.wire_dtype).dtype).element_size()
    total = 0
    for name in strategy.upload_names():
        size = strategy.upload_size(name, silo, most=True)
        if common.secure_aggregation:
            total += 4 * size
        elif (
            sends_changes(common)
            and base_of(received, name, size) is not None
            and name != BUFFERS
        ):
            total += write_change(torch.zeros(size), common.wire_dtype, common.wire_topk).bytes
        else:
            total += whole * size
        total += 2 * ARRAY
    return total
