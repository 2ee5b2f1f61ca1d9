"""The same app in process, under Ray and deployed gives the same numbers; a killed federation resumes without a trace.

Three real silos on this machine, over gRPC with TLS and node keys; the tests share one federation.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading

import pytest
from hospitals import one_file
from ray_runs import command_of, local_superlink, run_under_ray
from tiny import summary_of
from trio import (
    FEDERATION,
    RUN,
    bring_up,
    end_silo,
    rows,
    start_run,
    supernode,
    text_of,
    wait_for,
)

from client.site.trust import audit
from server.cli.main import main
from server.deploy import following, local, processes, submit
from server.deploy.control import Control
from server.deploy.credentials import Credentials, ensure_credentials
from server.deploy.local import parts, record
from server.results.history import History
from server.results.models import FILE, FOLDER
from server.results.run_directory import CONFIG, read_toml
from server.results.study import study_config, study_runs
from server.run.evaluated_models import evaluation_settings, read_models
from server.simulation.evaluate import evaluate, gather_models
from server.simulation.simulate import simulate
from server.simulation.survey import survey
from server.watch.source import WatchSource

pytestmark = pytest.mark.deployed

TWO = "  - {name: hospital-02, data: demo}\n"
SETTINGS = {
    **RUN,
    "rounds": 2,
    "strategy": "ditto",
    "augment": "flip,rotate:15,shift:1,perspective:0.2,brightness:0.1",
    "wire-dtype": "topk",
    "hold-out": "hospital-02",
    "keep-models": "reported",
}
DATA = {**{key: RUN[key] for key in ("dataset", "partition", "threads")}, "silos": 3}


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A run in this process, one hospital held out."""
    out = tmp_path_factory.mktemp("runs") / "here"
    return simulate({**SETTINGS, "silos": 3, "out": str(out)}, quiet=True)


def test_in_process_and_deployed_give_the_same_numbers(federation, here, tmp_path):
    """Bit for bit: metrics of every silo and round, losses included, and the bytes. Whole models: APPLE's, below."""
    submit.run({**SETTINGS, "out": str(tmp_path / "there")})
    assert rows(tmp_path / "there") == rows(here)
    bounds = [read_toml(run / CONFIG)["robust"] for run in (here, tmp_path / "there")]
    assert bounds == ["none", "screen"]  # unless set; here nothing is beyond the bounds
    assert any("zero_shot" in row for row in rows(here))
    kept = own_models(tmp_path / "there")
    assert kept == own_models(here) and set(kept) == {"hospital-01", "hospital-03"}


@pytest.mark.exhaustive
def test_the_config_of_a_deployed_run_gives_its_bits_in_process(federation, tmp_path):
    """Also where ``screen`` bounds: the largest of three silos counts as no more than the median silo's samples."""
    submit.run({**RUN, "rounds": 2, "weight-cap": 1, "out": str(tmp_path / "there")})
    config = {**read_toml(tmp_path / "there" / CONFIG), "silos": 3}
    simulate({**config, "out": str(tmp_path / "again")}, quiet=True)
    assert rows(tmp_path / "again") == rows(tmp_path / "there")
    simulate({**RUN, "rounds": 2, "silos": 3, "out": str(tmp_path / "plain")}, quiet=True)
    assert rows(tmp_path / "plain") != rows(tmp_path / "there")


def own_models(run):
    """The files of the models that the silos have sent at the end."""
    return {
        file.parent.name: file.read_bytes()
        for file in (run / "checkpoint").glob(f"*/{FOLDER}/*/{FILE}")
    }


@pytest.fixture(scope="module")
def ports(folder):
    with local_superlink() as ports:
        yield ports


# Under Ray, without the federation. Pictures: the matrix of models, below.
@pytest.mark.exhaustive
def test_ray_gives_the_same_numbers(ports, tmp_path):
    """Samples with several inputs, whose changes travel coded."""
    settings = {
        **RUN,
        "strategy": "ditto",
        "wire-dtype": "int8",
        "silos": 3,
        "keep-models": "reported",
    }
    settings |= {"dataset": str(one_file(tmp_path, "stays")), "model": "auto"}
    simulate({**settings, "out": str(tmp_path / "here")}, quiet=True)
    run_under_ray(settings, tmp_path / "there", ports)
    assert rows(tmp_path / "there") == rows(tmp_path / "here")
    assert len(own_models(tmp_path / "there")) == 3 and own_models(
        tmp_path / "there"
    ) == own_models(tmp_path / "here")


# Methods that send or keep more than a model; that of boosted trees takes tables (``test_tasks_deployed.py``)
MORE = {
    **RUN,
    "rounds": 2,
    "strategy": "fedem,fedrdn,floco,gh-ofl,knn-per,pfedfda",
    "fedem.components": 2,
    "floco.corners": 2,
    "floco.tau": 1,
}
TREES = {"strategy": "fedxgb", "model": "trees", "dataset": "breast-cancer"}


# Integers of layers, and of their squares; masked and deployed: ``test_secure_deployed.py``
SUMS = {"strategy": "fedlama", "secure-aggregation": True}


@pytest.mark.exhaustive
@pytest.mark.parametrize("own", [{"strategy": "fedem"}, SUMS, TREES], ids=str)
def test_ray_gives_the_numbers_of_other_methods(own, ports, tmp_path):
    """Several models, sums, trees. What a silo keeps is coded alike for all methods: ``test_every_method.py``."""
    settings = {**MORE, **own, "silos": 3}
    simulate({**settings, "out": str(tmp_path / "here")}, quiet=True)
    run_under_ray(settings, tmp_path / "there", ports)
    assert rows(tmp_path / "there") == rows(tmp_path / "here")
    assert (own is SUMS) == any("secure_silos" in row for row in rows(tmp_path / "here"))


@pytest.mark.exhaustive
def test_these_methods_deployed(federation, tmp_path):
    submit.run({**MORE, "out": str(tmp_path / "there")})
    simulate({**MORE, "silos": 3, "out": str(tmp_path / "here")}, quiet=True)
    assert rows(tmp_path / "there") == rows(tmp_path / "here")


@pytest.mark.exhaustive
def test_a_matrix_deployed(federation, here, tmp_path):
    """Of models that the silos have sent, the whole of it; else what needs none."""
    matrix = evaluate(here, tmp_path / "a", "all")
    there = tmp_path / "b"
    given = ["--models", "all", "--federation", federation.connection.name, "--out", str(there)]
    near = shutil.copytree(here, tmp_path / "near", ignore=shutil.ignore_patterns("silos"))
    assert main(["evaluate", str(near), *given]) == 0
    assert (there / "matrix.csv").read_text() == matrix.read_text()
    far = shutil.copytree(near, tmp_path / "far", ignore=shutil.ignore_patterns(FOLDER))
    assert main(["evaluate", str(far), *given[:-1], str(tmp_path / "c")]) == 0
    cells = [line.split(",") for line in matrix.read_text().splitlines()]
    # What needs no silo's own model
    kept = [cell for cell in cells if cell[0] in ("model", "shared", cell[1])]
    assert (tmp_path / "c" / "matrix.csv").read_text() == "".join(
        f"{','.join(cell)}\n" for cell in kept
    )
    assert {cell[0] for cell in kept} == {"model", "shared", "hospital-01", "hospital-03"}


@pytest.mark.exhaustive
def test_a_survey_deployed(federation, tmp_path):
    """Over the wire as in this process, and the silos' logs say what left."""
    there = tmp_path / "there"
    assert (
        main(["survey", "--federation", federation.connection.name, "--out", str(there)]) == 0
    )
    here = survey(DATA, tmp_path / "here")
    assert (there / "survey.json").read_text() == (here / "survey.json").read_text()
    assert (there / "survey.csv").read_text().count("label") > 20
    entries = audit.verify_log(federation.directory / "silos" / "hospital-01" / "audit").entries
    assert entries[-1]["asked"] == "query.survey"
    assert entries[-1]["sent"][0]["keys"] == ["day", "label.label", "n"]


@pytest.mark.exhaustive
def test_a_matrix_under_ray(ports, here, tmp_path):
    matrix, out = evaluate(here, tmp_path / "a"), tmp_path / "b"
    files = gather_models(here, tmp_path / "models", "shared")
    values = {**DATA, **evaluation_settings(read_models(files)), "out": str(out)}
    directory = submit.open_directory(out, study_config(study_runs(values)), "", resume=False)
    (tmp_path / "models").rename(directory.path / "models")
    run_under_ray(
        {k: v for k, v in values.items() if k not in ("out", "ala")}, out, ports, "matrix.csv"
    )
    assert (out / "matrix.csv").read_text() == matrix.read_text()


def superlink(federation):
    return [local.status(federation)["superlink"]["pid"]]


def server_app(federation):
    """The process that runs our ServerApp, started by the SuperLink's SuperExec."""
    return [
        one.pid
        for one in processes.find(federation.directory)
        if "flwr-serverapp" in command_of(one.pid)
    ]


@pytest.mark.exhaustive
def test_a_federation_killed_in_mid_run_resumes_as_if_it_had_not_been(
    federation, folder, tmp_path, monkeypatch
):
    """kill -9 of a SuperNode after round 2 of 12, of the SuperLink after round 4, of the ServerApp after round 6; each
    time what is left of the run is stopped, `up` mends, and `resume` goes on.
    """
    settings = {**RUN, "strategy": "apple", "rounds": 12, "apple.common-init": True}
    settings["local-epochs"] = 60  # rounds that last until a busy machine has found the process
    simulate({**settings, "silos": 3, "out": str(tmp_path / "here")}, quiet=True)
    # A follower would wait ten minutes for a dead SuperLink
    monkeypatch.setattr(following, "SILENCE_SECONDS", 10.0)
    out = tmp_path / "there"
    for after, victims in ((2, supernode), (4, superlink), (6, server_app)):
        killed(out, settings, after, victims)
        bring_up(folder)
        settings = {**settings, "resume": True}
    submit.run({**settings, "out": str(out)})
    assert rows(out) == rows(tmp_path / "here")


def killed(out, settings, after, victims):
    """A run whose victims are killed after that round, to its end."""
    ended = []

    def follow():
        try:
            submit.run({**settings, "out": str(out)})
            ended.append("completed")
        except RuntimeError as error:
            ended.append(str(error))

    follower = threading.Thread(target=follow)
    follower.start()
    wait_for(lambda: f'"round": {after},' in text_of(out / "progress.jsonl"), 120)
    pids = victims(record.find_local())
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    if victims is supernode:
        submit.stop()
    follower.join(timeout=120)
    assert ended and ended[0] != "completed"


@pytest.mark.exhaustive
def test_what_dies_in_a_round_costs_nothing(federation, folder, tmp_path):
    """kill -9 of the template process, then of a SuperNode in the middle of a round, with `lost-silo=resend`.

    The silo is named while the round waits; `up` starts it again, it gets its message once more, and every number is
    what it would have been.
    """
    bring_up(folder)
    settings = {
        **RUN,
        "strategy": "apple",
        "rounds": 4,
        "local-epochs": 60,
        "lost-silo": "resend",
    }
    simulate({**settings, "silos": 3, "out": str(tmp_path / "here")}, quiet=True)
    out = tmp_path / "there"
    follower = start_run(settings, out)
    wait_for(lambda: '"round": 1,' in text_of(out / "progress.jsonl"), 120)
    os.kill(local.status(record.find_local())["warm"]["pid"], signal.SIGKILL)
    wait_for(lambda: '"round": 2,' in text_of(out / "progress.jsonl"), 120)
    (pid,) = supernode(record.find_local())
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: "hospital-02 is gone; waits for it" in text_of(out / "progress.jsonl"), 60)
    bring_up(folder)
    follower.join(timeout=240)
    assert not follower.is_alive()
    assert rows(out) == rows(tmp_path / "here")


@pytest.mark.exhaustive
def test_a_stopped_silo_does_not_stop_the_others(federation, folder, tmp_path):
    """A silo that hangs (SIGSTOP) is named once the round's time is up; with a quorum of two the run goes on."""
    bring_up(folder)
    (pid,) = supernode(record.find_local())
    out = tmp_path / "out"
    settings = {**RUN, "strategy": "fedavg", "rounds": 3, "round-timeout": 12.0, "min-silos": 2}
    follower = start_run(settings, out)
    try:
        wait_for(lambda: '"round": 1,' in text_of(out / "progress.jsonl"), 120)
        os.kill(pid, signal.SIGSTOP)
        follower.join(timeout=240)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert not follower.is_alive()
    history = History(out / "history.csv")
    left_out = {(r.round, r.silo) for r in history.rows if r.metric == "rejected"}
    assert (3, "hospital-02") in left_out
    assert {r.silo for r in history.rows if r.round == 3 and r.metric == "accuracy"} == {
        "hospital-01",
        "hospital-03",
    }
    at_server = WatchSource(out)
    at_site = WatchSource(record.state_root() / "trio" / "silos" / "hospital-01", "hospital-01")
    for source in (at_server, at_site):
        source.poll()
    shown = {row["name"]: row for row in at_server.board.picture()["run"]["silos"]}
    missed = sum(
        (r.silo, r.metric) == ("hospital-02", "rejected") and r.round <= 3 for r in history.rows
    )
    assert shown["hospital-02"]["missed"] == missed > 0
    own = at_site.board.picture()["run"]
    assert [row["name"] for row in own["silos"]] == ["hospital-01"]
    assert (own["strategy"], own["state"], own["round"], own["rounds"]) == (
        "fedavg",
        "done",
        3,
        3,
    )
    assert own["silos"][0]["test"] == shown["hospital-01"]["test"] and own["bytes_down"] > 0


@pytest.mark.exhaustive
def test_a_hospital_that_left_joins_late(federation, folder, tmp_path):
    """hospital-02 has trained here, and is shut out; it comes back as the newcomer of a run that has begun.

    The others wait in their round for it, so the run need not be long. What it does from then on is what it does in
    process, where it joins in that round.
    """
    bring_up(folder)
    settings = {**RUN, "strategy": "ditto", "rounds": 6}
    submit.run({**settings, "rounds": 1, "out": str(tmp_path / "before")})
    (tmp_path / "federation.yaml").write_text(FEDERATION.format(name="trio").replace(TWO, ""))
    bring_up(tmp_path)
    out = tmp_path / "there"
    follower = start_run({**settings, "late-joiners": "any", "min-silos": 2, "silos": 3}, out)
    wait_for(lambda: '"round": 1,' in text_of(out / "progress.jsonl"), 120)
    (other,) = supernode(record.find_local(), "hospital-03")
    os.kill(other, signal.SIGSTOP)
    try:
        bring_up(folder)
    finally:
        os.kill(other, signal.SIGCONT)
    follower.join(timeout=240)
    assert not follower.is_alive()
    (entry,) = summary_of(out)["runs"]
    joined = entry["joined"]["hospital-02"]
    assert 2 <= joined <= 6
    late = {"late-joiners": f"hospital-02={joined}", "silos": 3}
    simulate({**settings, **late, "out": str(tmp_path / "here")}, quiet=True)
    assert rows(out) == rows(tmp_path / "here")
    mine = {
        r.round
        for r in History(out / "history.csv").rows
        if r.silo == "hospital-02" and r.split == "test"
    }
    assert mine == set(range(joined, 8))


@pytest.mark.exhaustive
def test_an_impostor_under_an_absent_hospitals_name_is_refused(
    federation, folder, tmp_path, capfd
):
    """hospital-02 is away; a silo with a key of its own, registered as `intruder`, says that it is hospital-02."""
    bring_up(folder)
    out = tmp_path / "impostor"
    settings = {**RUN, "strategy": "fedamp", "rounds": 2, "out": str(out)}
    submit.run(settings)
    running = record.find_local()
    silo = next(s for s in running.silos if s.name == "hospital-02")
    own = Credentials(running.directory / "credentials")
    theirs = ensure_credentials(tmp_path / "theirs", silos=["hospital-02"], hosts=["localhost"])
    command = parts.supernode_part(running, silo, own)
    command[command.index(str(own.node_key(silo.name)))] = str(theirs.node_key(silo.name))
    with Control(running.connection) as control:
        control.register("intruder", theirs.node_public_pem("hospital-02"))
        end_silo(running)
        environment = parts.part_environment(running.directory, "intruder", 3) | {
            "SILOFL_POLICY": "public"
        }
        log = tmp_path / "intruder.log"
        processes.start_process(
            "intruder", command, directory=running.directory, log=log, environment=environment
        )
        wait_for(
            lambda: {n.name: n.status for n in control.nodes()}["intruder"] == "online", 60
        )
        wait_for(
            lambda: {n.name: n.status for n in control.nodes()}["hospital-02"] != "online", 90
        )
    submit.run({**settings, "rounds": 3, "resume": True, "min-silos": 2, "round-timeout": 20.0})
    said = capfd.readouterr().err
    assert (
        "refused: node " in said
        and "calls itself hospital-02, and its key is registered as intruder" in said
    )
    history = History(out / "history.csv").rows
    assert {r.silo for r in history if r.metric == "rejected" and r.round == 3} == {
        "hospital-02"
    }
    assert {r.silo for r in history if r.metric == "accuracy" and r.round == 3} == {
        "hospital-01",
        "hospital-03",
    }
    end_silo(running, "intruder")
    bring_up(folder)
    left = audit.verify_log(running.directory / "silos" / "hospital-01" / "audit")
    assert (left.faults, left.notes) == ([], [])
    mine = [
        entry
        for entry in left.entries
        if entry["run"] == out.name and entry["asked"] == "train"
    ]
    assert [entry["round"] for entry in mine] == [1, 2, 3]
    assert {entry["asked-by"] for entry in mine} == {f"127.0.0.1:{running.fleet_port}"}
    assert all(
        {r["name"] for r in entry["sent"]} == {"model.model/vector", "metrics", "config"}
        for entry in mine
    )
    # The hospital itself is back, with its own key
    submit.run({**settings, "rounds": 4, "resume": True})
    assert {r.silo for r in History(out / "history.csv").rows if r.round == 4 and r.silo} == {
        "hospital-01",
        "hospital-02",
        "hospital-03",
    }
