"""The limit of bytes in a study's draft: real replies of every method are within it, and it is no multiple of them."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from typing import Any

import pytest
from cases import CASES, OPTIONS, typical
from hospitals import NETWORKS, hospital_files
from secured import Secured, go
from study_text import TEXTS
from tiny import federate, random_silos
from two_layers import DEEP

from client.protocol.study import parse_study
from client.site.record import close_records
from client.site.release import describe_reply
from server.deploy.study_draft import draft
from server.results.reply_sizes import TEXT, declared_data, reply_sizes

THREE = declared_data('{"shape": [3], "classes": 3}')
WIDE = {
    **DEEP,
    "mlp__hidden": "300",
}  # vectors of 8 kB and more, so that they outweigh the text


def sizes_of(run):
    """The bytes of each silo's replies as its record counts them, by the kind of the message."""
    sent: Any = defaultdict(lambda: defaultdict(list))
    for message, reply in run.grid.traffic:
        size = sum(item["bytes"] for item in describe_reply(reply))
        kind = message.metadata.message_type.split(".")[0]
        sent[run.grid.name_of(message.metadata.dst_node_id)][kind].append(size)
    return sent


def fits(run, data, text=TEXT + 2048, silos=0):
    """Every reply is within its size, and the sizes of training at most twice what is really sent, beside the text."""
    sent = sizes_of(run)
    most = reply_sizes(run.settings, data, silos or len(sent))
    assert most is not None
    for kind in ("train", "evaluate", "query"):
        largest = max(max(by_kind.get(kind, [0])) for by_kind in sent.values())
        assert largest <= getattr(most, kind), kind
        if kind == "train":
            assert most.train <= 2 * largest + text
    method, whole = run.strategy, run.strategy.layout.size
    method.start_round(1)
    bounds = {silo: method.most_sizes(silo) for silo in method.silos}
    for number in range(1, 20):
        method.start_round(number)
        for silo, bound in bounds.items():
            vectors = method.sizes(silo)
            assert all(size <= bound.get(name, whole) for name, size in vectors.items())
    return most


@typical(CASES)
def test_every_method(three, tiny_bn, name):
    settings = {**WIDE, **OPTIONS, **CASES[name][0], "rounds": 4}
    run = federate(three, min_metric_samples=1, evidence="on", **settings)
    fits(run, THREE)


@pytest.mark.parametrize(
    "codec, per_number",
    [
        ({"wire_dtype": "float16"}, 2),
        ({"wire_dtype": "int8"}, 1 + 4 / 1024),
        ({"wire_dtype": "topk", "wire_topk": 0.1}, 0.8),
        ({"wire_sparse": True}, 4),
    ],
)
def test_every_format_of_what_travels(three, codec, per_number):
    run = federate(three, "fedavg", rounds=2, **WIDE, **codec)
    most = fits(run, THREE)
    assert per_number * 2103 < most.train < per_number * 2103 + TEXT + 500


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedlama", "fedproto"])
def test_masked_sums(tmp_path, method):
    """And what silos say to each other: each one's statement, and a sealed share for each."""
    files = random_silos(tmp_path, [6, 11, 8, 7, 9])
    run = go(files, tmp_path, Secured(tmp_path, files), strategy=method, **WIDE)
    fits(run, THREE, TEXT + 2048 + 8 * 640)
    close_records()


@pytest.mark.parametrize("task", ["multilabel", "ordinal", "regression", "survival", "balls"])
def test_every_task(tmp_path, task):
    files = hospital_files(tmp_path, task)
    run = federate(files, "fedavg", rounds=1, evidence="on", **NETWORKS[task])
    spec = run.federation.registration.data_spec
    fits(run, {"shape": spec.shape, "classes": spec.classes, "task": spec.task}, 1 << 20)


def test_own_models_that_leave_count(three):
    run = federate(three, "ditto", rounds=1, keep_models="reported", **WIDE)
    assert fits(run, THREE).evaluate > 4 * 2103


def limits_of(values, **changes):
    text = draft("s", values, texts=TEXTS, end=None, apps=["0" * 64], **changes)
    return text, parse_study(text, "s.toml").limits


def test_a_run_within_the_draft_ends(three):
    """All that a silo sends in two methods' runs is within the limit, and more than a third of it."""
    values = {"rounds": 20, "model": "mlp", "mlp.hidden": "300", "batch-size": 4}
    text, limits = limits_of({**values, "strategy": "fedavg,scaffold"}, data=THREE)
    changes = {key.replace(".", "__").replace("-", "_"): value for key, value in values.items()}
    runs = [federate(three, method, **changes) for method in ("fedavg", "scaffold")]
    silos = [sizes_of(run) for run in runs]
    for name in three:
        total = sum(sum(map(sum, of[name].values())) for of in silos)
        assert limits.bytes / 3 < total < limits.bytes
    assert re.search(
        r"bytes = \d+  # \d+ for the largest message: shape \[3\], 3 classes\n", text
    )


def test_without_the_shape_the_draft_says_so():
    text, limits = limits_of({"strategy": "fedavg"})
    assert limits.bytes == 10**9
    assert "bytes = 1000000000  # not derived: state shape and classes under `agreed`" in text
    assert limits_of({"strategy": "fedavg"}, bytes_=5000)[1].bytes == 5000


def test_a_schema_fixes_what_it_names():
    schema = {"features": [{"name": n} for n in ("age", "sex")], "labels": ["no", "yes"]}
    data = declared_data(json.dumps({"schema": schema}))
    assert (data["shape"], data["classes"]) == ((2,), 2)
