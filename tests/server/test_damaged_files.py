"""Damaged ``progress.jsonl`` and ``summary.json`` of a run directory: lines are skipped, a summary is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from studies import make_run
from taken import silofl

from server.deploy.following import RunFollower
from server.report.head import notes_of
from server.report.study import StudyResults
from server.results.reading import read_events, read_summary
from server.results.run_directory import RunDirectory
from server.run.withdrawal import withdraw

GOOD = [
    {"event": "silos", "strategy": "fedavg", "seed": 42, "samples": {"a": 5, "b": 7}},
    {
        "event": "round",
        "strategy": "fedavg",
        "seed": 42,
        "round": 1,
        "rounds": 2,
        "silos": 2,
        "score": "accuracy",
    }
    | {"accuracy": 0.5, "seconds": 1.0, "bytes": 8, "rejected": {}, "bounded": {}},
    {"event": "note", "time": "", "message": "a remark", "about": "state"},
]
BAD = [
    b"",
    b"\xff\xfe",
    b'{"event": "note", "mess',
    b"[1]",
    b"3",
    b"null",
    b"[" * 100_000,
    b'{"event": ["note"]}',
    b'{"event": "note"}',
    b'{"event": "note", "message": 3}',
    b'{"event": "error", "about": "state"}',
    b'{"event": "round", "round": 1.5}',
    b'{"event": "round", "strategy": [], "seed": {}, "round": "x", "rounds": 2, "seconds": 1, "bytes": 1}',
    b'{"event": "round", "strategy": "fedavg", "seed": 42, "round": 1, "rounds": 2, "seconds": "x", "bytes": 1}',
    b'{"event": "silos", "samples": 3}',
    b'{"event": "silos"}',
    b'{"event": "models"}',
    b'{"event": "refused", "message": null}',
]


@pytest.fixture
def run(tmp_path):
    """A finished study, and its progress with a bad line behind every good one."""
    path = make_run(
        tmp_path / "run", {"fedavg": [0.5, 0.6]}, counts={"hospital-01": 10, "hospital-02": 20}
    )
    lines = [
        line for bad in BAD for line in (*(json.dumps(event).encode() for event in GOOD), bad)
    ]
    (path / "progress.jsonl").write_bytes(
        b"\n".join(lines) + b'\n{"event": "note", "message": "cut'
    )
    return path


def test_every_reader_skips_what_is_no_event(run, capsys):
    file = run / "progress.jsonl"
    assert read_events(file) == GOOD * len(BAD)
    assert RunDirectory(run).sample_counts() == {"a": 5, "b": 7}
    (note,) = notes_of(StudyResults(run))
    assert (note["message"], note["times"]) == ("a remark", len(BAD))
    progress = RunFollower(file)
    progress.tail.position = 0
    progress.read()
    assert progress.round == 1 and not progress.error
    assert capsys.readouterr().err.splitlines()[:2] == [
        "fedavg seed 42  round 1/2  2 silos  accuracy 0.5000  1.0 s  0.0 MB",
        "a remark",
    ]
    with file.open("ab") as writing:
        writing.write(b'\n{"event": "round"}\n')
    progress.read()
    assert silofl("report", run) == 0
    assert silofl("watch", run, "--text", "--once") == 0


def test_a_withdrawal_leaves_no_damaged_line(run):
    """It may name the hospital."""
    silo = read_summary(run / "summary.json")["runs"][0]["silos"][0]
    with (run / "progress.jsonl").open("ab") as file:
        file.write(f'\n{{"event": "note", "mess": "{silo}\n'.encode())
    withdraw(silo, [run])
    text = (run / "progress.jsonl").read_text()
    assert silo not in text and [json.loads(line) for line in text.splitlines()] == GOOD * len(
        BAD
    )


def damaged(run):
    """Contents of a summary by what is wrong with them."""
    whole = (run / "summary.json").read_bytes()
    first = json.loads(whole)["runs"][0]
    silo = first["silos"][0]
    entries = {
        "runs.1 = 3: must be": 3,
        "runs.1.strategy is missing": {},
        "runs.1.per_silo = []": {**first, "per_silo": []},
        "runs.1.final is missing": {
            key: value for key, value in first.items() if key != "final"
        },
        f"runs.1.per_silo.{silo} = 0.5": {
            **first,
            "per_silo": {**first["per_silo"], silo: 0.5},
        },
        f"runs.1.per_silo.{silo}.accuracy.float = '0.9'": {
            **first,
            "per_silo": {
                **first["per_silo"],
                silo: {**first["per_silo"][silo], "accuracy": "0.9"},
            },
        },
        f"{silo} has no counts of samples": {**first, "per_silo": {}},
    }
    texts: dict[str, Any] = {"the key runs is missing": {}, "summary.json: ": []}
    texts |= {fault: {"runs": [entry]} for fault, entry in entries.items()}
    return {
        "it is no JSON": whole[:-30],
        **{fault: json.dumps(value).encode() for fault, value in texts.items()},
    }


def test_a_damaged_summary_is_one_line(run, capsys):
    for fault, content in {
        **damaged(run),
        "it is no JSON (expected": b"\xff{}",
        "it is no JSON (recursion limit": b"[" * 100_000,
    }.items():
        (run / "summary.json").write_bytes(content)
        for command in (["report"], ["withdraw", "hospital-01"]):
            assert silofl(*command, run) == 2, (fault, command)
            (line,) = capsys.readouterr().err.splitlines()
            assert "summary.json" in line and fault in line and "from a copy" in line
