"""A hospital's policy over the wire: the site's own process refuses, before the app is there, and the others go on."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest
from study_text import TEXTS
from tiny import TinyGrid, train_replies
from trio import bring_up

from client.protocol import receipts
from client.protocol.study import parse_study
from client.site import release
from client.site.budget.ledger import Ledger
from client.site.counts import count_used_up
from client.site.record import Record
from client.site.study import approvals
from client.site.trust import audit
from client.studies import list_released
from client.study_record import read_export
from server.cli.main import main
from server.deploy import processes, submit
from server.deploy.local import record
from server.deploy.study_draft import app_sums, draft
from server.results.history import History
from server.results.models import FILE, FOLDER
from server.run import checkpoints
from server.run.loop import RoundLoop
from server.simulation.engine import flower_identity
from strategies.base.run_settings import parse_settings

pytestmark = [pytest.mark.deployed, pytest.mark.exhaustive]

FEDERATION = """\
name: strict
demo: {dataset: digits, partition: dirichlet, seed: 42}
silos:
  - {name: hospital-01, data: demo}
  - {name: hospital-02, data: demo}
  - {name: hospital-03, data: demo, policy: policy.toml}
"""

KINDS = ("query", "train", "train", "evaluate")
USED = {"runs": 1, "rounds": 1, "evaluations": 1, "queries": 1, "messages": 3, "days": 1}
RUNS = ("within", "outside")
ROOT = Path(__file__).parents[3]


def through_a_study(tmp_path, directory):
    """Hospital-03 now wants a study: what its log says of a run within one, and outside one."""
    (tmp_path / "policy.toml").write_text('studies = "required"\nmin-silos = 1\n')
    run = {"strategy": "fedavg", "rounds": 1, "threads": 1, "model": "mlp", "batch-size": 32}
    text = draft("trial", run, texts=TEXTS, end=None, apps=app_sums(ROOT))
    state, log = directory / "silos" / "hospital-03", directory / "logs" / "hospital-03.log"
    approvals.record_approval(state, "hospital-03", text, "Dr. B", "", [])
    before = len(log.read_text())
    submit.run({**run, "study": "trial", "out": str(tmp_path / "within")})
    assert "ERROR" not in log.read_text()[before:]
    submit.run(
        {**run, "study": "trial", "learning-rate": 0.01, "out": str(tmp_path / "outside")}
    )
    assert count_used_up(state, parse_study(text, "f")) | {"bytes": 0} == {**USED, "bytes": 0}
    entries = [entry for entry in audit.verify_log(state / "audit").entries if "study" in entry]
    assert [(entry["asked"], entry["study"]["name"]) for entry in entries] == [
        (asked, "trial") for asked in ("study approved", "query", "train", "evaluate")
    ]
    # Under which rules each message left, and what it took of the study
    for entry in entries[1:]:
        assert (
            entry["policy"]
            == hashlib.sha256((tmp_path / "policy.toml").read_bytes()).hexdigest()
        )
        assert entry["budget"]["after"]["messages"] == entry["budget"]["before"]["messages"] + 1
        assert (
            entry["budget"]["after"]["bytes"]
            == entry["budget"]["before"]["bytes"] + entry["bytes"]
        )
    assert [entry["budget"]["after"]["messages"] for entry in entries[1:]] == [1, 2, 3]
    # The study's participants
    assert entries[1]["rules"]["min-silos"] == 3 and entries[1]["versions"]["silofl"]
    assert [entry["withheld"].keys() & {"metrics"} for entry in entries[1:]] == [
        set(),
        {"metrics"},
        {"metrics"},
    ]
    assert "macro_f1" in entries[2]["withheld"]["metrics"]
    through_receipts(tmp_path, state, entries)
    assert count_used_up(state, parse_study(text, "f"))["bytes"] == sum(
        entry["bytes"] for entry in entries
    )
    (cohort,) = list_released(state)
    assert (cohort["models"], cohort["studies"]) == (3, {"": 2, "trial": 1}) and len(
        cohort["cohort"]
    ) == 64
    silos = {
        name: {r.silo for r in History(tmp_path / name / "history.csv").rows if r.silo}
        for name in RUNS
    }
    assert [len(silos[name]) for name in RUNS] == [3, 2]
    return [
        line
        for line in log.read_text().splitlines()
        if line.startswith("ERROR: hospital-03 refuses")
    ]


def through_receipts(tmp_path, state, entries):
    """The server has signed every line of the run within the study, and the site has what was sent within it."""
    theirs = [
        receipts.read_receipt(text)
        for text in receipts.read_kept(tmp_path / "within" / receipts.FILE)
    ]
    mine = [one for one in theirs if one.silo == "hospital-03"]
    assert [(one.line, one.hash) for one in mine] == [
        (entry["line"], entry["hash"]) for entry in entries[1:]
    ]
    own = receipts.read_kept(state / "audit" / receipts.FILE)
    # The last reply has no message after it
    assert [one.text in own for one in mine] == [True, True, False]
    command = [
        "audit",
        str(state),
        "--study",
        "trial",
        "--receipts",
        str(tmp_path / "within" / receipts.FILE),
    ]
    key = state.parents[1] / "credentials" / "nodes" / "hospital-03"
    assert main([*command, *f"--export {tmp_path}/trial.json --sign-with {key}".split()]) == 0
    record, signer = read_export(tmp_path / "trial.json")
    assert (
        record["messages"] == 3
        and record["receipts"]["line"] == mine[-1].line
        and signer.startswith("SHA256:")
    )
    assert record["used"]["messages"] == 3 and [run["run"] for run in record["runs"]] == [
        "within"
    ]


def through_a_budget(tmp_path, directory):
    """Hospital-03 now keeps a budget: one round fits, a second one is refused by its own process before it trains.

    The app's own account, which the server gets, is what the site has charged.
    """
    policy, state = tmp_path / "policy.toml", directory / "silos" / "hospital-03"
    log = directory / "logs" / "hospital-03.log"
    run = {
        "strategy": "fedavg",
        "rounds": 1,
        "threads": 1,
        "model": "mlp",
        "batch-size": 32,
        "dp": True,
    }
    policy.write_text("epsilon = 100\nmin-silos = 1\n")
    submit.run({**run, "out": str(tmp_path / "private")})
    lines = Ledger(state).lines()
    assert [line["kind"] for line in lines] == ["charge", "sent"]
    spent = lines[0]["epsilon-after"]
    rows = History(tmp_path / "private" / "history.csv").rows
    costs = {row.silo: row.value for row in rows if row.metric == "epsilon"}
    assert len(costs) == 3 and costs["hospital-03"] == spent
    # No metric without noise leaves
    assert not any(row.metric == "accuracy" and row.value == row.value for row in rows)
    entries = audit.verify_log(state / "audit").entries
    budgets = [
        one["budget"] for one in entries if "epsilon" in one.get("budget", {}).get("after", {})
    ]
    assert [(one["before"]["epsilon"], one["after"]["epsilon"]) for one in budgets] == [
        (0.0, spent)
    ]
    assert_same_in_process(tmp_path, directory, run, lines[0]["run-id"])
    before = len(log.read_text())
    policy.write_text(f"epsilon = {spent}\nmin-silos = 1\n")
    submit.run({**run, "out": str(tmp_path / "used-up")})
    assert (
        f"ERROR: hospital-03 refuses: its policy has epsilon = {spent}"
        in log.read_text()[before:]
    )
    rows = History(tmp_path / "used-up" / "history.csv").rows
    assert {row.silo for row in rows if row.metric == "epsilon"} == {
        "hospital-01",
        "hospital-02",
    }
    assert [row.silo for row in rows if row.metric == "rejected"] == ["hospital-03"]
    assert len(Ledger(state).lines()) == 2


def through_own_models(tmp_path, directory):
    """Hospital-03's own model stays by its own process; then it leaves once, and the resumed run trains no further."""
    state, log = directory / "silos" / "hospital-03", directory / "logs" / "hospital-03.log"
    run = {
        "strategy": "fedper",
        "rounds": 1,
        "threads": 1,
        "model": "mlp",
        "batch-size": 32,
        "keep-models": "reported",
    }
    before = len(log.read_text())
    for rules, silos in (("", 2), ("own-model = true\n", 3)):
        (tmp_path / "policy.toml").write_text(f"{rules}min-silos = 1\n")
        submit.run({**run, "out": str(tmp_path / f"own-{silos}")})
        kept = list(
            (tmp_path / f"own-{silos}" / "checkpoint" / "fedper-42" / FOLDER).glob(f"*/{FILE}")
        )
        assert len(kept) == silos
    asks = "and a message asks for this silo's own model"
    assert (
        f"ERROR: hospital-03 refuses: its policy has own-model = false, {asks}"
        in log.read_text()[before:]
    )
    assert audit.verify_log(state / "audit").entries[-1]["asked"] == "evaluate.own_model"
    with Record(state).reading() as db:
        assert db.execute(
            "SELECT count(*) FROM disclosed WHERE kind = 'own model'"
        ).fetchone() == (1,)
    assert sum(cohort["own_models"] for cohort in list_released(state)) == 1
    # A server that hides it
    shutil.rmtree(tmp_path / "own-3" / "checkpoint" / "fedper-42" / FOLDER)
    submit.run({**run, "rounds": 2, "resume": True, "out": str(tmp_path / "own-3")})
    assert (
        "ERROR: hospital-03 refuses: its own model has left in this run (keep-models)"
        in log.read_text()[before:]
    )


def assert_same_in_process(tmp_path, directory, run, run_id):
    """With the keys of the three sites' noise, the same data and the run's id, a simulation sends the same bits."""
    names = [f"hospital-{number:02}" for number in (1, 2, 3)]
    settings = parse_settings({**run, "silos": 3})
    grid = TinyGrid({name: directory / "data" / f"{name}.npz" for name in names}, settings)
    for name, context in zip(names, grid.contexts.values(), strict=True):
        state = tmp_path / "in-process" / name
        state.mkdir(parents=True)
        shutil.copy(directory / "silos" / name / "noise-key", state)
        context.node_config["state-dir"] = str(state)
    loop = RoundLoop(grid, settings)
    with flower_identity(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints.secrets, "token_hex", lambda _: run_id)
        loop.run()
    sent = {
        silo: arrays(release.describe_reply(reply)) for (silo, _), reply in train_replies(grid)
    }
    for name in names:
        entries = audit.verify_log(directory / "silos" / name / "audit").entries
        (left,) = (e["sent"] for e in entries if (e["asked"], e["run"]) == ("train", "private"))
        assert arrays(left) == sent[name] != []


def arrays(sent):
    return [one["sha256"] for one in sent if "shape" in one]


def test_a_server_that_weakens_every_setting(tmp_path, monkeypatch, capfd):
    """Nothing of hospital-03 leaves but one line that names rule and setting; the same line is in its own log."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flower"))
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "0")
    (tmp_path / "policy.toml").write_text("")  # the defaults
    (tmp_path / "federation.yaml").write_text(FEDERATION)
    weak = {
        "strategy": "fedavg",
        "rounds": 1,
        "threads": 1,
        "model": "mlp",
        "batch-size": 1,
        "min-metric-samples": 1,
    }
    try:
        up = bring_up(tmp_path)
        submit.run({**weak, "out": str(tmp_path / "run")})
        before = (up.directory / "logs" / "hospital-03.log").read_text()
        submit.run({**weak, "batch-size": 8, "rounds": 2, "out": str(tmp_path / "allowed")})
        with Record(up.directory / "silos" / "hospital-03").reading() as db:
            counted = db.execute(
                "SELECT kind || ' ' || silo FROM messages ORDER BY rowid"
            ).fetchall()
        logs = {
            silo.name: (up.directory / "logs" / f"{silo.name}.log").read_text()
            for silo in up.silos
        }
        logs_of_study = through_a_study(tmp_path, up.directory)
        through_a_budget(tmp_path, up.directory)
        through_own_models(tmp_path, up.directory)
    finally:
        processes.end(processes.find(record.state_root() / "strict"), grace=1.0)
    assert logs_of_study[1:] == [
        "ERROR: hospital-03 refuses: the study trial has learning-rate = 0.05, the run 0.01"
    ]
    line = "hospital-03 refuses: its policy has min-batch-size = 8, the run batch-size = 1"
    assert f"ERROR: {line}" in logs["hospital-03"].splitlines()
    assert f"cannot take part: {line}\n" in capfd.readouterr().err
    assert line in (tmp_path / "run" / "report.html").read_text()
    assert "sent its data summary" in logs["hospital-01"] and "hospital-03 sent" not in before
    silos = {row.silo for row in History(tmp_path / "run" / "history.csv").rows if row.silo}
    assert silos == {"hospital-01", "hospital-02"}
    # Of the run that it allows each message counts once, in the process that stays and in the one that does not.
    assert counted == [(f"{kind} hospital-03",) for kind in KINDS]
