"""The line that a user reads: each reason once, the system's own reason, and what was expected."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from failing import fails
from studies import make_run
from study_text import study_text

from client.studies import read_study
from partitions.common.errors import DataError, UserError
from partitions.common.files import make_folder, write_atomically
from partitions.common.own_code import import_file
from server.cli.main import COMMANDS, main
from server.cli.options import connection_of, federation_of
from server.deploy import submit
from server.deploy.compose import compose_file
from server.deploy.federation import read_federation
from server.deploy.following import plain_reason, round_line
from server.deploy.local.record import read_record
from server.deploy.room.listing import NamedRun, run_lines
from server.rendering import fill
from server.results.reading import read_json
from server.results.reasons import merge_reasons
from server.results.run_directory import read_toml
from server.results.survey import read_survey
from server.run.checkpoints import refusal
from strategies.base.run_settings import parse_settings
from strategies.base.transport.reporting import Damage

ROOT = Path(__file__).resolve().parents[2]
FIVE = [f"hospital-0{i}" for i in range(1, 6)]
TOGETHER = "5 silos (hospital-01, hospital-02, hospital-03 and 2 more): "


def test_a_reason_of_several_silos_is_one_line():
    """Whatever is said of each: a bare reason, a sentence that begins with its name, or one with it in brackets."""
    assert merge_reasons((silo, "no reply") for silo in FIVE) == [f"{TOGETHER}no reply"]
    said = [(silo, f"{silo} is left out: it has 3 classes") for silo in FIVE]
    assert merge_reasons(said) == [f"{TOGETHER}is left out: it has 3 classes"]
    nodes = [(f"node {n}", f"a silo (node {n}) cannot take part: no data") for n in (7, 8)]
    assert merge_reasons(nodes) == ["2 silos (node 7, node 8): no data"]
    assert merge_reasons([("a", "x"), ("b", "b, held out: y"), ("c", "x")]) == [
        "2 silos (a, c): x",
        "b, held out: y",
    ]


def test_what_is_missing_is_said_of_each_silo():
    """A reason that begins with its silo's name has it before it, too: "no model of a: a sends none"."""
    assert merge_reasons([("a", "a sends none")], bare=True) == ["a: a sends none"]
    both = [(name, f"{name} sends none") for name in "ab"]
    assert merge_reasons(both, bare=True) == ["2 silos (a, b): sends none"]


def test_a_round_that_goes_on_without_five_silos():
    event = {
        "strategy": "apple",
        "seed": 1,
        "round": 2,
        "rounds": 3,
        "silos": 1,
        "score": "auc",
    }
    event |= {
        "seconds": 1.0,
        "bytes": 1,
        "rejected": dict.fromkeys(FIVE, "no reply within 9 s"),
    }
    assert round_line(event).endswith(f"  without {TOGETHER}no reply within 9 s")


def test_a_simulation_that_lost_several_states():
    damaged = [Damage(silo, 3, (), "its file is damaged") for silo in FIVE]
    assert refusal(damaged).startswith(f"{TOGETHER}its file is damaged; the run")


def test_a_run_has_one_short_line_in_status():
    details = (
        "<class 'partitions.common.errors.UserError'>:<'round 1: 0 usable\nupdates"
        + "x" * 300
        + "'>"
    )
    federation = {
        "name": "demo",
        "fleet": "here:1",
        "connection": "demo",
        "silos": [],
        "elsewhere": [],
        "superlink": {"running": True, "executor": True},
        "certificates": [],
    }
    runs = [
        NamedRun(
            "ditto", "ditto", "failed", 0, 1, 3, "eve", "runs/a", plain_reason(details), ("1",)
        ),
        NamedRun("apple", "apple", "running", 0, 2, 3, "eve", "runs/b", "", ("2",)),
    ]
    _, failed, running = fill(
        "cli/status.txt", **federation, lines=run_lines(runs)
    ).splitlines()
    assert failed.startswith("  ditto") and "UserError" in failed and len(failed) <= 152
    assert running.startswith("  apple") and "2/3" in running


# --- what the system says -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "read",
    [
        lambda folder: read_toml(folder / "config.toml"),
        lambda folder: read_json(folder / "manifest.json"),
        read_survey,
        read_record,
        lambda folder: read_federation(folder / "federation.yaml"),
    ],
)
def test_what_may_not_be_read_is_not_called_damaged(tmp_path, monkeypatch, read):
    def refuse(path, *args, **options):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(PermissionError):
        read(tmp_path)


def test_where_nothing_can_be_made():
    """The system says of a new folder in /proc that it does not exist."""
    for make in (make_folder, lambda path: write_atomically(path, "")):
        with pytest.raises(OSError) as raised:
            make(Path("/proc/here"))
        assert (raised.value.strerror, raised.value.filename) == (
            "nothing can be made in /proc",
            "/proc/here",
        )


def test_a_silo_s_data_that_are_a_folder(tmp_path):
    file = tmp_path / "federation.yaml"
    (tmp_path / "data.npz").mkdir()
    file.write_text("name: x\nsilos: [{name: a, data: data.npz}]\n")
    fails(DataError, r"data\.npz: Is a directory; give the path", read_federation, file)


# --- what was expected --------------------------------------------------------------------------------------------


def test_another_file_than_a_study(tmp_path, capsys):
    """A bundle, a federation file and a picture are no studies; `study check` and `study sign` say what is."""
    for name, content in (
        ("b.tar", b"\x1f\x8b\xff\0" * 99),
        ("f.yaml", b"name: demo\nsilos: []\n"),
    ):
        (tmp_path / name).write_bytes(content)
        expected = rf'{name} is no study: a text with kind = "silofl study 1" is expected'
        fails(DataError, expected, read_study, tmp_path / name)
        for action in ("check", "sign", "show"):
            assert main(["study", action, str(tmp_path / name)]) == 2
            assert "is no study: a text with kind" in capsys.readouterr().err


def test_the_list_of_methods_has_methods_alone():
    with pytest.raises(UserError, match="unknown strategy 'fedavgg'") as raised:
        parse_settings({"strategy": "fedavgg"})
    names = str(raised.value).partition("there are: ")[2].split(", ")
    assert "fedavg" in str(names) and not {"evaluate", "survey"} & {*names}
    assert parse_settings({"strategy": "survey"}).common.strategy == "survey"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("x = 1\ndef f(:\n", "line 2: SyntaxError"),
        ("\n\nx = y\n", "line 3: NameError: name 'y'"),
    ],
)
def test_a_fault_in_a_method_s_file_names_the_file(tmp_path, monkeypatch, text, line):
    file = tmp_path / "fedprobe.py"
    file.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    fails(UserError, rf"{file}, {line}", import_file, "fedprobe", file)


@pytest.mark.exhaustive
def test_every_command_names_a_method_s_file_with_a_fault(tmp_path):
    for package in ("client", "models", "partitions", "server", "strategies"):
        shutil.copytree(ROOT / package, tmp_path / package)
    (tmp_path / "strategies" / "fedprobe.py").write_text(
        "import torch\nraise TypeError('no paper')\n"
    )
    for command in (["strategies"], ["simulate", "--rounds", "1"]):
        done = subprocess.run(
            [sys.executable, "-m", "server.cli.main", *command],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        named = f"{tmp_path}/strategies/fedprobe.py, line 2: TypeError: no paper"
        assert done.returncode == 2 and named in done.stderr


# --- the documented way -------------------------------------------------------------------------------------------


def test_one_option_names_a_federation_in_all_commands(tmp_path, monkeypatch):
    """By its name, or by its file, from which the name of its connection comes."""
    file = tmp_path / "clinics.yaml"
    file.write_text("name: clinics\nsilos: []\n")
    for named in ("clinics", str(file)):
        assert connection_of(named) == "clinics"
    assert federation_of(str(file)).path == file
    fails(UserError, "--federation clinics: none of that name is up", federation_of, "clinics")
    asked = list[str]()

    def stop(name, run):
        asked.append(name)
        return []

    monkeypatch.setattr(submit, "stop", stop)
    assert main(["stop", "--federation", str(file)]) == main(["stop"]) == 0
    assert asked == ["clinics", ""]
    commands = {command.name: command for command in COMMANDS}
    for name in (
        "status",
        "run",
        "stop",
        "down",
        "evaluate",
        "survey",
        "add-silo",
        "remove-silo",
        "relay",
    ):
        assert "'--federation'" in str(commands[name].options), name


def test_the_compose_file_begins_with_the_command_that_has_its_settings(tmp_path):
    """`flwr run` does not read `run:`, and with the default settings the demo hardly learns."""
    file = tmp_path / "federation.yaml"
    file.write_text("name: x\nrun: {model: mlp, dp: true, learning-rate: 0.1}\nsilos: []\n")
    federation = read_federation(file)
    command = """flwr run . x --stream --run-config 'model="mlp" dp=true learning-rate=0.1'"""
    assert federation.flower_command == command
    assert f"# {command}\n" in compose_file(federation, tmp_path, ROOT)


def test_natural_knows_its_number_of_silos(tmp_path, capsys):
    """The 16 centres of azpro, also where a folder of files has none to count."""
    line = f"partition --dataset azpro --partition natural --out {tmp_path}/parts".split()
    assert main(line) == 0
    assert len(list((tmp_path / "parts").glob("*.npz"))) == 16
    assert main([*line[:-1], f"{tmp_path}/other", "--silos", "3"]) == 2
    assert "azpro comes with 16 silos" in capsys.readouterr().err


def test_withdraw_says_what_it_did(tmp_path, monkeypatch, capsys):
    run = make_run(tmp_path / "run")
    assert main(["withdraw", "b", str(run)]) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first == f"{run}: b is deleted from history.csv, summary.json"
    assert last == "what others averaged stays; `silofl remove-silo b` shuts it out"


def test_a_study_may_come_through_a_pipe(tmp_path):
    """It is read once: `silofl approve /dev/stdin`."""
    (tmp_path / "study.toml").write_text(study_text())
    os.mkfifo(tmp_path / "pipe")
    with ThreadPoolExecutor(1) as writer:
        writer.submit((tmp_path / "pipe").write_text, study_text())
        text, study = read_study(tmp_path / "pipe")
    assert (text, study) == read_study(tmp_path / "study.toml")
