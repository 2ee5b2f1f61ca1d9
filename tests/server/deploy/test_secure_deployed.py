"""Masked rounds over the wire: real SuperNodes that require them, a study with their keys, the bits of a simulation."""

from __future__ import annotations

import os
import signal
import threading
from functools import partial
from pathlib import Path

import pytest
from study_text import TEXTS
from tiny import TinyGrid
from trio import start_run, supernode, text_of, wait_for

from client.protocol.secure import KEYS, START, SURVEY, UNMASK
from client.site.study import approvals
from client.site.trust import audit, audit_page
from partitions.common.errors import RunFailedError
from server.deploy import local, processes, submit
from server.deploy.federation import read_federation
from server.deploy.local import record
from server.deploy.study_draft import app_sums, draft, known_peers
from server.results.history import History
from server.results.survey import read_survey
from server.run.loop import RoundLoop
from server.simulation.engine import flower_identity
from server.simulation.survey import survey, survey_deployed
from strategies.base.run_settings import parse_settings

pytestmark = [pytest.mark.deployed, pytest.mark.exhaustive]
ROOT = Path(__file__).parents[3]
NAMES = ["hospital-01", "hospital-02", "hospital-03"]
FOUR = [*NAMES, "hospital-04"]
NINE = [f"hospital-{number:02}" for number in range(1, 10)]
FEDERATION = """\
name: masked
demo: {dataset: digits, partition: dirichlet, seed: 42}
silos:
"""
POLICY = """\
studies = "required"
min-silos = 1
secure-aggregation = "required"
secure-peers = 2
"""
RUN = {
    "strategy": "fedavg",
    "rounds": 2,
    "threads": 1,
    "model": "mlp",
    "batch-size": 32,
    "min-batch-size": 8,  # a policy's default: one of four silos has a last batch of five
    "secure-aggregation": True,
}


def start(folder, names, run, monkeypatch):
    """A federation of hospitals that require masks, and have approved a study of this run."""
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    monkeypatch.setenv("FLWR_HOME", str(folder / "flower"))
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "0")
    group = run.get("secure-group", 1)
    (folder / "policy.toml").write_text(f"{POLICY}secure-group = {group}\n")
    lines = (f"  - {{name: {name}, data: demo, policy: policy.toml}}\n" for name in names)
    (folder / "federation.yaml").write_text(FEDERATION + "".join(lines))
    federation = read_federation(folder / "federation.yaml")
    up = local.up(federation, echo=lambda line: None)
    peers = known_peers(federation)
    assert [*peers] == names
    study = draft("trial", run, texts=TEXTS, end=None, apps=app_sums(ROOT), peers=peers)
    for name in names:
        approvals.record_approval(up.directory / "silos" / name, name, study, "Dr. B", "", [])
    return up


def scores(rows):
    """The metrics of a run that its models determine; a policy keeps some."""
    return {
        (row.round, row.silo, row.split, row.snapshot, row.metric): row.value
        for row in rows
        if row.silo and row.split and row.value == row.value
    }


@pytest.mark.parametrize(
    "names, group, robust",
    [
        (NAMES, 1, "none"),
        pytest.param(FOUR, 2, "none", marks=pytest.mark.drill),
        pytest.param(NINE, 3, "groups", marks=pytest.mark.drill),
    ],
)
def test_hospitals_that_require_masks(tmp_path, monkeypatch, names, group, robust):
    """No vector leaves without masks, the sums are those of a simulation, and each silo's log says what happened.

    So it is with two groups of two, too, which each hospital's policy requires; and with three groups of three, whose
    sums are opened one by one and compared.
    """
    count, run = len(names), {**RUN, "secure-group": group, "secure-robust": robust}
    try:
        up = start(tmp_path, names, run, monkeypatch)
        submit.run({**run, "study": "trial", "out": str(tmp_path / "run")})
        data = {name: up.directory / "data" / f"{name}.npz" for name in names}
        settings = parse_settings({**run, "silos": count})
        loop = RoundLoop(TinyGrid(data, settings), settings)
        with flower_identity():
            loop.run()
        logs = {
            name: audit.verify_log(up.directory / "silos" / name / "audit") for name in names
        }
    finally:
        processes.end(processes.find(record.state_root() / "masked"), grace=1.0)
    rows = History(tmp_path / "run" / "history.csv").rows
    left = scores(rows)
    assert len({number for number, *_ in left}) == 3
    assert left.items() <= scores(loop.history.rows).items()
    assert [row.value for row in rows if row.metric == "secure_silos"] == [count, count]
    for log in logs.values():
        asked = [entry["asked"] for entry in log.entries[1:]]
        assert asked == ["query", KEYS, START, "train", UNMASK, "train", UNMASK, "evaluate"]
        arrays = [one for e in log.entries[1:] for one in e["sent"] if "shape" in one]
        assert {(one["name"], one["dtype"]) for one in arrays} == {("masked/sum", "uint32")}
        page = audit_page.page(log.entries, log.entries[0]["time"][:7])
        assert f"  masked    2 rounds, 2 sums over {count} silos; 0 repeated" in page


@pytest.mark.drill
def test_a_hospital_that_is_killed(tmp_path, monkeypatch):
    """One of four, after the first round: the others' sums are opened, and the run says over how many they are."""
    names, run = FOUR, {**RUN, "rounds": 5, "local-epochs": 20, "lost-silo": "go-on"}
    out = tmp_path / "run"
    try:
        up = start(tmp_path, names, run, monkeypatch)
        follower = start_run({**run, "study": "trial"}, out)
        wait_for(lambda: '"round": 1,' in text_of(out / "progress.jsonl"), 180)
        (pid,) = supernode(up, "hospital-04")
        os.kill(pid, signal.SIGKILL)
        follower.join(timeout=300)
    finally:
        processes.end(processes.find(record.state_root() / "masked"), grace=1.0)
    rows = History(out / "history.csv").rows
    silos = [row.value for row in rows if row.metric == "secure_silos"]
    assert (silos[0], silos[-1], len(silos)) == (4, 3, 5)
    assert {row.silo for row in rows if row.metric == "rejected"} == {"hospital-04"}
    assert [row.value for row in rows if row.metric == "secure_attempts"] == [1] * 5


@pytest.mark.drill
def test_five_hospitals_of_which_some_are_lost(tmp_path, monkeypatch):
    """With the default policy one may be missing; with two the run ends, and says who. Resumed, it is as simulated."""
    names, methods = [*FOUR, "hospital-05"], ("local", "fedavg", "ditto")
    run = {**RUN, "strategy": ",".join(methods), "rounds": 6, "local-epochs": 20}
    monkeypatch.setattr(f"{__name__}.POLICY", POLICY.replace("secure-peers = 2\n", ""))
    out, faults = tmp_path / "run", list[str]()

    def follow(**more):
        try:
            submit.run({**run, "study": "trial", "out": str(out), "round-timeout": 30, **more})
        except RunFailedError as error:
            faults.append(str(error))

    def sums(method="fedavg"):
        file = out / "history.csv"
        rows = History(file).rows if file.exists() else []
        return [r.value for r in rows if (r.strategy, r.metric) == (method, "secure_silos")]

    try:
        up = start(tmp_path, names, run, monkeypatch)
        follower = threading.Thread(target=follow)
        follower.start()
        for name, count in (("hospital-05", 5), ("hospital-04", 4)):
            wait_for(partial(lambda count: count in sums(), count), 180)
            (pid,) = supernode(up, name)
            os.kill(pid, signal.SIGKILL)
        follower.join(timeout=300)
        (fault,) = faults
        assert "missing: hospital-04, hospital-05: resume the run when they are online" in fault
        local.up(read_federation(tmp_path / "federation.yaml"), echo=lambda line: None)
        follow(resume=True)
        assert faults == [fault]
        data = {name: up.directory / "data" / f"{name}.npz" for name in names}
        rows = History(out / "history.csv").rows
        for method in methods:
            own = [row for row in rows if row.strategy == method]
            settings = parse_settings({**run, "strategy": method, "silos": 5})
            loop = RoundLoop(grid := TinyGrid(data, settings), settings)
            grid.absent = {(r.silo, r.round) for r in own if r.metric == "rejected"}
            with flower_identity():
                loop.run()
            # A sum over a list of four has another scale than one of five without one
            simulated, found = scores(loop.history.rows), scores(own)
            assert found == pytest.approx({key: simulated[key] for key in found}, rel=1e-5)
    finally:
        processes.end(processes.find(record.state_root() / "masked"), grace=1.0)
    # Ditto's shared model is FedAvg's, so its sums are over the same hospitals
    assert sums("local") == [] and sums("ditto") == sums()
    assert {4, 5} <= {*sums()} and len(sums()) == 6


def test_a_survey_under_masks(tmp_path, monkeypatch):
    """Over gRPC: the server gets the sum of a simulation of the same hospitals, and each silo sent integers alone."""
    run = {"strategy": "survey", "rounds": 1, "threads": 1, "secure-aggregation": True}
    monkeypatch.setattr(
        f"{__name__}.POLICY",
        POLICY + 'methods = ["survey"]\nclass-means = true\nmin-cell = 5\n',
    )
    out = tmp_path / "run"
    try:
        up = start(tmp_path, NAMES, run, monkeypatch)
        survey_deployed({"secure-aggregation": True, "study": "trial"}, out, "masked")
        logs = {
            name: audit.verify_log(up.directory / "silos" / name / "audit") for name in NAMES
        }
        (tmp_path / "policy.toml").write_text(
            'methods = ["survey"]\nclass-means = true\nmin-cell = 5\n'
        )
        sums = {"secure-aggregation": True}
        simulated = survey(
            sums, tmp_path / "here", up.directory / "data", str(tmp_path / "policy.toml")
        )
    finally:
        processes.end(processes.find(record.state_root() / "masked"), grace=1.0)
    found = read_survey(out)
    assert found.summed == NAMES and found == read_survey(simulated)
    assert found.answers["all"]["n"] > 1000
    for log in logs.values():
        assert [e["asked"] for e in log.entries[1:]] == ["query", KEYS, START, SURVEY, UNMASK]
        (line,) = (entry for entry in log.entries[1:] if entry["asked"] == SURVEY)
        assert [(one["name"], one["dtype"]) for one in line["sent"] if "shape" in one] == [
            ("masked/sum", "uint32")
        ]
        assert "column" not in str(line["sent"])
