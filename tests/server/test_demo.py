"""The demonstration: its data, its outcome, and that nothing of it stays behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from partitions.common.errors import RunFailedError
from server.deploy.control import Connection
from server.deploy.federation import read_federation
from server.deploy.local.demo_data import split_demo
from server.deploy.local.record import UpFederation
from server.report.study import Study
from server.report.verdict import verdict
from server.simulation import demo
from server.simulation.simulate import simulate

ROOT = Path(__file__).parents[2]


def test_the_federation_file_has_the_demonstrations_data_and_settings(tmp_path: Path) -> None:
    """So the commands of docs/consortium.md print the demonstration's figures."""
    shown, own = read_federation(ROOT / "federation.yaml"), demo.write_federation(tmp_path)
    assert (shown.demo, shown.run, shown.silos) == (own.demo, own.run, own.silos)


def test_each_hospital_has_enough_to_test(tmp_path: Path) -> None:
    files = split_demo(demo.write_federation(tmp_path), tmp_path, lambda line: None)
    assert list(files) == [f"hospital-{i:02d}" for i in range(1, 13)]
    for file in files.values():
        with np.load(file, allow_pickle=False) as data:
            assert len(data["y_test"]) >= 25 and len(data["y_train"]) >= 10


@pytest.mark.exhaustive  # `make demo` is what has it
def test_a_gain_is_shown(tmp_path: Path) -> None:
    """The demonstration's own settings in process, where they give the same numbers as deployed."""
    assert isinstance(demo.DATA["settings"], dict)
    values = {**demo.RUN, **demo.DATA, **demo.DATA["settings"], "strategy": demo.STRATEGIES, "rounds": demo.ROUNDS}
    values |= {"silos": demo.SILOS, "checkpoint-every": 1000, "out": str(tmp_path / "run")}
    values.pop("settings")
    study = Study(simulate(values, quiet=True))
    assert study.best is not None
    assert verdict(study, study.best, "local").shown == 1
    assert study.mean_gain(study.best, "local").mean > 0.05


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the demonstration does with its federation, instead of doing it."""
    made: list[str] = []

    def up(federation: Any, *, echo: Any) -> None:
        made.append(f"up {federation.name}")

    def clear(name: str) -> int:
        made.append(f"clear {name}")
        return 0

    monkeypatch.setattr(demo.local, "up", up)
    monkeypatch.setattr(demo.local, "clear", clear)
    return made


@pytest.mark.parametrize("error", [RuntimeError("a silo died"), KeyboardInterrupt()])
def test_everything_is_stopped_whatever_happens(
    error: BaseException, calls: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(values: dict[str, object], connection: str) -> None:
        calls.append(f"run {connection}")
        raise error

    monkeypatch.setattr(demo.submit, "run", run)
    with pytest.raises(type(error)):
        demo.demo(tmp_path)
    assert calls == [f"{what} silofl-demo" for what in ("clear", "up", "run", "clear")]


def test_the_runs_own_config_repeats_it() -> None:
    """A federation of own files has no data set: the setting's default, which config.toml holds, asks for none."""
    up = UpFederation(name="x", file="federation.yaml", demo=None, connection=Connection("x", "127.0.0.1:2"))
    assert demo.submit._own_data(up, {"dataset": "digits", "partition": "dirichlet", "data-dir": ""}) == {}
    with pytest.raises(ValueError, match=r"dataset = breast-cancer: .*\(each silo's own file\)"):
        demo.submit._own_data(up, {"dataset": "breast-cancer"})


def test_exit_codes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo.signal, "signal", lambda *_: None)
    for error, code in ((RunFailedError("a silo died"), 1), (KeyboardInterrupt(), 130)):

        def fail(root: Path, error: BaseException = error) -> Path:
            raise error

        monkeypatch.setattr(demo, "demo", fail)
        assert demo.main() == code
    assert capsys.readouterr().err == "demo: a silo died\ndemo: interrupted\n"


def test_an_earlier_demonstration_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    demo.clear(out)
    out.mkdir()
    (out / "config.toml").touch()
    demo.clear(out)
    assert not out.exists()
    out.mkdir()
    (out / "thesis.txt").touch()
    with pytest.raises(ValueError, match="holds something else"):
        demo.clear(out)
    assert (out / "thesis.txt").exists()
