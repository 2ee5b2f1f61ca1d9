"""Methods and networks of a package that is installed, by its entry points: a real one, in a process of its own."""

from __future__ import annotations

import os

import forks
import pytest
from tiny import summary_of

METHOD = """
from strategies.base.info import MethodInfo
from strategies.base.strategy import PersonalizedStrategy
from models.networks.mlp import Mlp
from models.networks.registry import ModelSpec


class Twin(PersonalizedStrategy):
    info = MethodInfo(name="twin", title="FedAvg again", paper="A. Nobody, 2026", spelling="Twin")


narrow = ModelSpec("one hidden layer of 4", "A. Nobody, 2026", "tables", lambda s, n, _: Mlp(s, n, (4,)), ("table",))
"""
ENTRIES = """[silofl.strategies]
twin = twins:Twin
[silofl.networks]
narrow = twins:narrow
"""


def install(folder, entries=ENTRIES, method=METHOD):
    """A package as pip leaves it behind."""
    about = folder / "twins-1.0.dist-info"
    about.mkdir(parents=True)
    (folder / "twins.py").write_text(method)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: twins\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(entries)
    return folder


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    """Where processes begin that have imported the libraries, and nothing of silofl."""
    with forks.server(tmp_path_factory.mktemp("forks"), forks.LIBRARIES) as path:
        yield path


def silofl(libraries, folder, *words):
    """Exit code and standard error."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    with (folder / "err").open("w") as errors, open(os.devnull, "r+") as nothing:
        files = [nothing.fileno(), nothing.fileno(), errors.fileno()]
        code = forks.ask(libraries, words, folder, environment, files)
    return code, (folder / "err").read_text()


def test_an_installed_method_and_network_run(tmp_path, libraries):
    folder = install(tmp_path / "site")
    small = "--silos 2 --partition iid --rounds 1 --dataset breast-cancer --set model=narrow"
    words = f"simulate --strategy twin {small} --out run".split()
    code, said = silofl(libraries, folder, *words)
    assert code == 0, said
    (run,) = summary_of(folder / "run")["runs"]
    assert run["strategy"] == "twin"
    assert "narrow" in (folder / "run/config.toml").read_text()


@pytest.mark.exhaustive
def test_a_plugin_that_cannot_be_used_is_named(tmp_path, libraries):
    other = "[silofl.strategies]\nfedavg = twins:Twin\n"
    for i, (entries, method, words) in enumerate(
        (
            (
                other,
                METHOD.replace('"twin"', '"fedavg"'),
                "takes the name 'fedavg' of a method of silofl",
            ),
            (
                ENTRIES,
                "import nothing_of_that_name",
                "twin of twins (silofl.strategies) cannot be loaded: ModuleNot",
            ),
            (
                "[silofl.networks]\nmlp = twins:narrow\n",
                METHOD,
                "mlp of twins (silofl.networks) has the name of a network",
            ),
        )
    ):
        folder = install(tmp_path / f"{i}", entries, method)
        command = "partition --dataset digits --partition iid --out x"
        code, said = silofl(libraries, folder, *command.split())
        assert code == 2 and words in said and said.count("\n") == 1, said
