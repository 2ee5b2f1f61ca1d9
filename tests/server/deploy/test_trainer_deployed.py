"""A hospital's own trainer in a real federation: allowed by policies, in the audit log, and fixed by a study."""

from __future__ import annotations

from pathlib import Path

import pytest
from study_text import TEXTS
from trio import RUN, bring_up, reach_over, rows

from client.protocol.code import digest_of_code
from client.protocol.launch import FLOWER
from client.protocol.methods import METRICS
from client.site.study import approvals
from client.site.trust import audit
from server.deploy import local, submit
from server.deploy.study_draft import app_sums, draft
from server.results.history import History
from server.simulation.simulate import simulate

pytestmark = [pytest.mark.deployed, pytest.mark.exhaustive]
ROOT = Path(__file__).parents[3]
TRAINER = "ward_loop:train"
POLICY = f"""\
trainers = ["ward_loop"]
metrics = {[*METRICS]}
min-silos = 1
min-batch-size = 1
min-metric-samples = 1
"""
FEDERATION = """\
name: wards
demo: {dataset: digits, partition: dirichlet, seed: 42}
silos:
  - {name: hospital-01, data: demo, policy: public}
  - {name: hospital-02, data: demo, policy: policy.toml}
  - {name: hospital-03, data: demo, policy: public}
"""
SETTINGS = {
    **RUN,
    "rounds": 2,
    "strategy": "ditto",
    "trainer": TRAINER,
    "hold-out": "hospital-03",
    "hold-out-epochs": 1,
}
STUDY = {"strategy": "fedavg", "rounds": 1, "threads": 1, "model": "mlp", "trainer": TRAINER}


@pytest.fixture
def code(tmp_path, monkeypatch):
    """A folder with the hospitals' trainer, beside one whose trainer has a comment more."""
    for key, value in {"XDG_STATE_HOME": "state", "FLWR_HOME": "flower"}.items():
        monkeypatch.setenv(key, str(tmp_path / value))
    for key, value in FLOWER.items():
        monkeypatch.setenv(key, value)
    text = (ROOT / "examples" / "trainers" / "plain.py").read_text()
    for folder, more in (("code", ""), ("other", "# changed\n")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "ward_loop.py").write_text(text + more)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "code"))
    monkeypatch.syspath_prepend(tmp_path / "code")
    return tmp_path / "other"


def test_a_trainer_deployed(code, tmp_path):
    """A newcomer, a resumed run, the log and a study; the numbers of a run in process."""
    (tmp_path / "policy.toml").write_text("min-silos = 1\n")
    (tmp_path / "federation.yaml").write_text(FEDERATION)
    simulate({**SETTINGS, "silos": 3, "out": str(tmp_path / "here")}, quiet=True)
    running = bring_up(tmp_path)
    state = running.directory / "silos" / "hospital-02"
    log = running.directory / "logs" / "hospital-02.log"
    try:
        submit.run({**STUDY, "out": str(tmp_path / "unlisted")})
        assert "its policy has trainers = [], the run trainer = ward_loop" in log.read_text()
        (tmp_path / "policy.toml").write_text(POLICY)
        for more in ({"rounds": 1}, {"resume": True}):
            submit.run({**SETTINGS, **more, "out": str(tmp_path / "there")})
        assert rows(tmp_path / "there") == rows(tmp_path / "here")
        assert any("zero_shot" in row for row in rows(tmp_path / "there"))
        entries = audit.verify_log(state / "audit").entries
        trained = [entry for entry in entries if entry["asked"] == "train"]
        assert [entry["trainer"] for entry in trained] == [digest_of_code(TRAINER)] * 2

        (tmp_path / "policy.toml").write_text(POLICY + 'studies = "required"\n')
        text = draft("trial", STUDY, texts=TEXTS, end=None, apps=app_sums(ROOT))
        approvals.record_approval(state, "hospital-02", text, "Dr. B", "", [])
        submit.run({**STUDY, "study": "trial", "out": str(tmp_path / "same")})
        assert silos(tmp_path / "same") == {"hospital-01", "hospital-02", "hospital-03"}
        changed = {"PYTHONPATH": str(code), "SILOFL_POLICY": str(tmp_path / "policy.toml")}
        reach_over(running, running.fleet_port, environment=changed)
        submit.run({**STUDY, "study": "trial", "out": str(tmp_path / "differs")})
        assert "the study trial has trainer = " in log.read_text()
        assert silos(tmp_path / "differs") == {"hospital-01", "hospital-03"}
    finally:
        local.down("wards")


def silos(run):
    return {row.silo for row in History(run / "history.csv").rows if row.n}
