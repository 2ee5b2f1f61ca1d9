"""Every command of the README and of docs/, started with nothing: no state, no runs, no data, no ~/.flwr, no home.

In an empty directory, with an environment that holds nothing but PATH and HOME; a real process for those of
:data:`REAL`, a fork of one that has imported all for the others. What a command cannot do it says in one line, with
what to do about it. (``make demo`` itself: ``first_command.py``. What the commands do where there is something: the
tests of each.)
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import forks
import pytest
from representatives import seldom

ROOT = Path(__file__).parents[2]
SILOFL = str(Path(sys.executable).parent / "silofl")
NO_FEDERATION = "no federation is up; `silofl up` starts one"
NO_SILO = "name a state directory or a bundle: of silos that joined from this machine, none has"
NO_FILE = "there is no federation.yaml: write one, or name another file"

# Arguments, exit code, and what standard error, or the last line of standard output, says.
FROM_NOTHING = [
    ("strategies --json", 0, r"\]"),
    ("simulate --strategy local,fedavg --rounds 1 --silos 2", 0, "runs/"),
    (
        "simulate --dataset mnist --data-dir nowhere --rounds 1",
        2,
        "nowhere: there is no such folder; make it, or name",
    ),
    (
        "partition --dataset digits --data-dir nowhere --partition iid --silos 2 --out parts",
        2,
        "nowhere: there is no such folder",
    ),
    ("relay", 2, "there is no federation.yaml"),
    ("plan --sizes 90,90,90,90,90 --effect 3", 0, "not answerable"),
    ("plan --pilot runs/pilot --effect 3", 2, "runs/pilot"),
    ("simulate --silos 2 --set min-silos=3", 2, "min-silos = 3 is more than silos = 2"),
    (
        "simulate --config runs/first/config.toml",
        2,
        "there is no configuration file runs/first/config.toml",
    ),
    ("simulate --data ours.npz", 2, "there is no such file"),
    ("up", 2, NO_FILE),
    ("status", 2, NO_FEDERATION),
    ("status --json", 2, NO_FEDERATION),
    ("run --strategy local,fedavg,apple --rounds 15", 2, NO_FEDERATION),
    ("run --connection elsewhere", 2, "there is no connection 'elsewhere'"),
    ("stop", 2, NO_FEDERATION),
    ("runs", 2, NO_FEDERATION),
    ("backup --out server.backup", 2, NO_FILE),
    ("restore north.backup", 2, "there is no file north.backup"),
    ("operator add alice --role operator", 0, "name: alice, role: operator"),
    ("operator log", 2, NO_FILE),
    ("drift model.safetensors --data new.npz", 2, "there is no model model.safetensors"),
    ("lineage model.safetensors", 2, "there is no model model.safetensors"),
    ("down", 0, "no federation is up"),
    (
        "down --federation typo",
        2,
        "there is no federation 'typo' on this machine; there are: none",
    ),
    ("compose federation.yaml --out docker-compose.yml", 2, NO_FILE),
    ("credentials", 2, NO_FILE),
    ("add-silo clinic-13", 2, NO_FILE),
    ("add-silo --request clinic-13.request", 2, NO_FILE),
    ("remove-silo clinic-13", 2, NO_FILE),
    ("request clinic-13", 0, "SHA256:"),
    ("audit", 2, NO_SILO),
    ("audit clinic-13.tar", 2, "there is no audit log in clinic-13.tar"),
    ("request --folder clinic-13 clinic-13", 0, "SHA256:"),
    ("withdraw clinic-13", 2, "no run in runs/ keeps anything of clinic-13"),
    ("withdraw clinic-13 runs/first", 2, "runs/first holds no run"),
    ("signing-key", 2, NO_FILE),
    ("signing-key --out stick/signing.key", 0, "SHA256:"),
    (
        "check-bundle clinic-13.tar --signed-by SHA256:9d2e",
        2,
        "there is no bundle clinic-13.tar",
    ),
    ("join clinic-13.tar --data ours.npz", 2, "there is no bundle clinic-13.tar"),
    (
        "join clinic-13.tar --data ours.npz --signed-by SHA256:9d2e",
        2,
        "there is no bundle clinic-13.tar",
    ),
    ("doctor", 2, "at a hospital: BUNDLE --data FILE"),
    (
        "study new study.toml --name heart-2026 --strategy fedavg,apple",
        2,
        "is no checkout with an app",
    ),
    ("study check study.toml", 2, "study.toml: No such file or directory"),
    ("study sign study.toml", 2, "study.toml: No such file or directory"),
    ("study show study.toml", 2, "study.toml: No such file or directory"),
    ("approve study.toml --yes --by B", 2, NO_SILO),
    ("studies", 2, NO_SILO),
    ("revoke heart-2026", 2, NO_SILO),
    ("budget", 2, NO_SILO),
    ("evaluate runs/first --out matrix", 2, "there is no runs/first"),
    ("survey --data centres --out look", 2, "there is no centres"),
    ("survey --federation hospitals --out look", 2, "there is no connection"),
    ("watch runs/first", 2, "there is no run directory runs/first"),
    ("schema ours.recipe.toml --out schema.toml", 2, "ours.recipe.toml cannot be read"),
    (
        "tune --strategy fedavg --trials 1 --rounds 1 --space learning-rate=log(0.01,0.1)",
        2,
        "--out DIR is needed",
    ),
    ("policy", 0, "what the server does with a model"),
    ("policy clinic-13", 2, "clinic-13: No such file or directory; write the policy there"),
    ("report runs/first", 2, "runs/first holds no run"),
    ("partition --dataset digits --silos 2 --plot parts.svg --out parts", 0, "parts"),
    ("import patients.csv --labels well,ill --out ours.npz", 2, "there is no patients.csv"),
    ("check-data ours.npz", 2, "ours.npz: there is no such file"),
    (
        "export runs/first --strategy apple --silo hospital-03 --out own.safetensors",
        2,
        "there is no directory",
    ),
    ("predict --model own.safetensors --data ours.npz", 2, "there is no model own.safetensors"),
]
# Where HOME cannot be written to, with a federation.yaml at hand.
NO_HOME = [
    ("simulate --strategy local --rounds 1 --silos 2", 0, "runs/"),
    ("up", 2, r"cannot make \S+/silofl/hospitals: .*; XDG_STATE_HOME names another folder"),
    ("status", 2, NO_FEDERATION),
    ("down", 0, "no federation is up"),
    (
        "credentials",
        2,
        r"cannot make \S+/silofl/hospitals: .*; XDG_STATE_HOME names another folder",
    ),
    (
        "add-silo clinic-13",
        2,
        "Flower's configuration .*; FLWR_HOME names another folder|there is no connection",
    ),
    ("request clinic-13", 2, "Not a directory"),
    (
        "signing-key",
        2,
        r"cannot make \S+/silofl/hospitals: .*; XDG_STATE_HOME names another folder",
    ),
    ("compose", 0, "hospital-12-head:"),
]


# One that deploys and a hospital's; test_release.py has one that computes.
REAL = {"up", "join clinic-13.tar --data ours.npz"}
Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def silofl(tmp_path_factory):
    """The command as it is typed; the environment is PATH, and what is given."""
    folder = tmp_path_factory.mktemp("forks")

    def run(arguments, cwd, **environment):
        words = arguments.split() if isinstance(arguments, str) else list(arguments)
        given = {"PATH": "/usr/bin:/bin", **environment}
        out, err = folder / "out", folder / "err"
        with open(os.devnull) as nothing, out.open("w") as output, err.open("w") as errors:
            if arguments in REAL:
                done = subprocess.run(
                    [SILOFL, *words],
                    cwd=cwd,
                    env=given,
                    stdin=nothing,
                    stdout=output,
                    stderr=errors,
                    check=False,
                )
                code = done.returncode
            else:
                code = forks.ask(
                    path,
                    words,
                    cwd,
                    given,
                    [nothing.fileno(), output.fileno(), errors.fileno()],
                )
        return subprocess.CompletedProcess(words, code, out.read_text(), err.read_text())

    with forks.server(folder) as path:
        yield run


def check(done, code, says):
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    lines = (done.stdout if code == 0 else done.stderr).splitlines()
    assert re.search(says, lines[-1]), lines
    if code:
        assert len(lines) == 1 and lines[0].startswith("silofl "), lines


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        case if i % 3 == 0 or case[0] in REAL else seldom(*case)
        for i, case in enumerate(FROM_NOTHING)
    ],
    ids=[c for c, _, _ in FROM_NOTHING],
)
def test_a_command_that_starts_with_nothing(arguments, code, says, silofl, tmp_path):
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    check(silofl(arguments, here, HOME=str(home)), code, says)


@pytest.mark.parametrize(("arguments", "code", "says"), NO_HOME, ids=[c for c, _, _ in NO_HOME])
def test_a_home_that_cannot_be_written_to(arguments, code, says, silofl, tmp_path):
    """Below a file nobody can make a folder, root neither."""
    (tmp_path / "file").touch()
    shutil.copy(ROOT / "federation.yaml", tmp_path)
    check(silofl(arguments, tmp_path, HOME=str(tmp_path / "file/home")), code, says)


def test_another_federation_is_left_alone(silofl, tmp_path):
    """A state folder of another name, and one that is no federation's, neither confuse a command nor go away."""
    other = tmp_path / ".local/state/silofl/other"
    (other / "credentials").mkdir(parents=True)
    (other / "credentials/ca.key").write_text("kept")
    check(silofl("status", tmp_path, HOME=str(tmp_path)), 2, NO_FEDERATION)
    check(silofl("run --strategy local", tmp_path, HOME=str(tmp_path)), 2, NO_FEDERATION)
    check(silofl("down", tmp_path, HOME=str(tmp_path)), 0, "no federation is up")
    check(silofl("down --federation typo", tmp_path, HOME=str(tmp_path)), 2, "there are: other")
    check(silofl("down --federation other", tmp_path, HOME=str(tmp_path)), 0, "other is down")
    assert (other / "credentials/ca.key").read_text() == "kept"


def test_every_documented_command_is_among_these():
    """A command that a document tells somebody to type is started with nothing here."""
    typed = set()
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for block in re.findall(r"```console\n(.*?)```", page.read_text(), re.DOTALL):
            typed |= set(
                re.findall(r"^\$ [^#\n]*?\bsilofl ([a-z][a-z-]*)\b", block, re.MULTILINE)
            )
    assert typed and typed <= {arguments.split()[0] for arguments, _, _ in FROM_NOTHING}
