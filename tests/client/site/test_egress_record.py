"""A line of the audit log: under which policy, rules and study a message left, what was held back, and the budget."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from gates import count_message, described
from study_text import study_text
from taken import silofl
from tiny import settings_of, write_silo

from client.app import app
from client.protocol import launch
from client.protocol.parsed import SiteError
from client.protocol.policy import Policy, read_policy
from client.protocol.study import parse_study
from client.site import release
from client.site.release import RECORD, rule_values
from client.site.terms import Terms, read_terms
from client.site.trust import audit
from server.simulation.engine import flower_identity
from strategies.base.state import GLOBAL
from strategies.base.transport.payload import Model, Payload, Wire, encode


def study():
    return parse_study(study_text(participants=4), "f")


@pytest.fixture
def node(tmp_path):
    (tmp_path / "policy.toml").write_text("min-metric-samples = 3\n")
    (tmp_path / "state").mkdir()
    return {
        "name": "a",
        "policy": str(tmp_path / "policy.toml"),
        "state-dir": str(tmp_path / "state"),
    }


def answered(node, content, own, run_id=1):
    """A reply with this content, as it leaves the site, to a message that its process has counted."""
    with flower_identity():
        message = Message(RecordDict(), dst_node_id=1, message_type="train")
        context = Context(run_id, 1, node, RecordDict(), {"strategy": "fedavg"})
        if own is not None:
            count_message(
                Policy(), own, node["state-dir"], str(run_id), "a", "train", "2026-01-02"
            )
        terms = Terms(read_terms(node, {}).policy, own)
        parsed = described(message, context, terms)
        reply: Message = release.release_reply(Message(content, reply_to=message), parsed)
    return reply


def log_of(node):
    found = audit.verify_log(Path(node["state-dir"]) / "audit")
    assert (found.faults, found.notes) == ([], [])
    return found.entries


def content(size, **site):
    """A reply of so many bytes, with what the app tells the site."""
    records = RecordDict({"config": ConfigRecord({"k": "x" * (size - len('{"k": ""}'))})})
    if site:
        records[RECORD] = ConfigRecord(site)
    return records


def test_the_rules_that_were_applied(node):
    """The file's, the stricter of it and the study, by the SHA-256 of the file and the values of all rules."""
    answered(node, content(20), None)
    answered(node, content(20), study())
    alone, within = log_of(node)
    policy = read_policy(node["policy"])
    assert (
        alone["policy"]
        == within["policy"]
        == hashlib.sha256(Path(node["policy"]).read_bytes()).hexdigest()
    )
    assert alone["rules"] == rule_values(policy) and alone["rules"]["min-metric-samples"] == 3
    assert within["rules"] == rule_values(policy) | {"metrics": ["loss"], "min-silos": 4}
    assert (
        within["study"] == {"name": "heart", "digest": study().digest} and "study" not in alone
    )
    assert set(within["versions"]) == {"python", *release.TOOLS}
    assert within["versions"]["flwr"].startswith("1.42.")


def test_a_line_tells_the_policy_or_that_there_is_none(node):
    line = release.rule_of(read_terms(node, {}))
    assert re.search(r"; policy: .*policy\.toml \(rules [0-9a-f]{16}\)$", line)
    line = release.rule_of(Terms(error=SiteError("no TOML")))
    assert line.endswith("; no policy can be read, so only refusals leave: no TOML")


def test_whatever_keeps_a_line_from_the_log_keeps_the_reply_here(node, monkeypatch):
    monkeypatch.setattr(release, "write_down", lambda *of: [][0])
    reason = answered(node, content(20), None).error.reason
    assert reason.startswith("nothing leaves: the audit log cannot be written: IndexError: ")


def test_rules_and_versions_stand_once_per_run_until_one_changes(node):
    for _ in range(2):
        answered(node, content(20), None)
    Path(node["policy"]).write_text("min-metric-samples = 4\n")
    for run in (1, 1, 2):
        answered(node, content(20), None, run)
    entries = log_of(node)
    assert [entry.get("rules", {}).get("min-metric-samples") for entry in entries] == [
        3,
        None,
        4,
        None,
        4,
    ]
    assert [entry.get("settings-line") for entry in entries] == [None, 1, None, 3, None]
    assert [{"run-config", "rules", "versions"} <= entry.keys() for entry in entries] == [
        True,
        False,
    ] * 2 + [True]
    assert len({entry["policy"] for entry in entries}) == 2


def test_the_budget_before_and_after(node):
    """Two replies of 20 and 30 bytes in run 1, one of 40 in run 2; one outside any study takes nothing."""
    for size, run in ((20, 1), (30, 1), (40, 2)):
        answered(node, content(size), study(), run)
    answered(node, content(50), None, 3)
    found = [(entry["budget"]["before"], entry["budget"]["after"]) for entry in log_of(node)]
    names = ("runs", "rounds", "messages", "days", "bytes", "evaluations")
    numbers = [[tuple(side[name] for name in names) for side in pair] for pair in found[:3]]
    assert numbers == [
        [(0, 0, 0, 0, 0, 0), (1, 1, 1, 1, 20, 0)],
        [(1, 1, 1, 1, 20, 0), (1, 2, 2, 1, 50, 0)],
        [(1, 2, 2, 1, 50, 0), (2, 3, 3, 1, 90, 0)],
    ]
    assert found[3] == ({}, {})


def test_what_the_app_tells_the_site_does_not_leave(node):
    reply = answered(
        node, content(20, metrics=["auc", "mae"], sums="its policy has sums = false"), None
    )
    assert list(reply.content) == ["config"]
    (entry,) = log_of(node)
    assert entry["withheld"] == {
        "metrics": ["auc", "mae"],
        "sums": ["its policy has sums = false"],
    }
    assert [record["name"] for record in entry["sent"]] == ["config"] and entry["bytes"] == 20


@pytest.mark.parametrize("kind", [ArrayRecord, MetricRecord])
def test_a_record_of_that_name_never_leaves(node, kind):
    """Whatever a malicious app hides in it stays here, and is not believed."""
    records = content(20)
    records[RECORD] = kind({}) if kind is ArrayRecord else kind({"a": 1.0})
    reply = answered(node, records, None)
    assert list(reply.content) == ["config"] and log_of(node)[0]["withheld"] == {}


def test_the_apps_words_are_bounded(node, capsys):
    answered(node, content(20, **{"x" * 999: ["y" * 999] * 999, "hash": ["\x1b[2J"]}), None)
    (entry,) = log_of(node)
    assert len(json.dumps(entry["withheld"])) < 25_000 and entry["withheld"]["hash"] == [
        "\x1b[2J"
    ]
    assert silofl("audit", node["state-dir"]) == 0
    out = capsys.readouterr().out
    assert "withheld" in out and "\\x1b[2J (hash)" in out and "\x1b" not in out


# ---- The app ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "audits"), [("evaluate", "1 withheld"), ("query", "1 withheld"), ("evaluate", "1")]
)
def test_the_app_reports_what_it_holds_back(tmp_path, monkeypatch, kind, audits):
    """To a process that takes the report out again, and to no other: an earlier one would let it leave."""
    monkeypatch.setenv(launch.BY_SITE, audits)
    (tmp_path / "policy.toml").write_text("min-metric-samples = 3\nmin-sum-samples = 99\n")
    file = write_silo(tmp_path / "a.npz", [[float(i), 1.0] for i in range(24)], [0, 1] * 12)
    settings = settings_of({"a": file}, batch_size=8, normalization="agreed")
    node = {"name": "a", "data": str(file), "policy": str(tmp_path / "policy.toml")}
    context = Context(1, 1, {**node, "state-dir": str(tmp_path)}, RecordDict(), settings.flat())
    config = {"round": 1, "classes": 2, "personal": False, "min_metric_samples": 99}
    sent = (
        encode(Payload({GLOBAL: Model(torch.zeros(6))}), config, Wire())
        if kind == "evaluate"
        else RecordDict()
    )
    with flower_identity():
        reply = app(Message(sent, 1, kind), context)
    assert not reply.has_error(), reply
    told: dict[str, Any] = dict(reply.content.config_records.get(RECORD, {}))
    if audits == "1":
        assert RECORD not in reply.content
    elif kind == "query":
        assert told == {
            "sums": [
                "its policy has min-sum-samples = 99, its training part has fewer patients"
            ]
        }
    else:
        assert (
            told["min-metric-samples"] == ["received.test", "received.val"]
            and "macro_f1" in told["metrics"]
        )
        assert not reply.content["metrics"]


def test_every_rule_has_its_value():
    assert rule_values(Policy())["methods"] == ["all"] and json.dumps(rule_values(Policy()))
