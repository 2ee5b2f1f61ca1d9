"""Silos on a device that is not the CPU (``phony``): the CPU's numbers, and what crosses between the two."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from phony import DEVICE, phony_device
from resuming import Crash, crash_after
from sklearn.datasets import load_digits
from tiny import SIMULATED, simulated

import client.app
import client.session
from server.results.history import Row
from server.run.loop import RoundLoop
from strategies import strategies

SILOS = 2
# There one silo trains
METHODS = sorted(name for name, method in strategies().items() if not method.info.pooled)


NEEDS: dict[str, dict[str, Any]] = {  # settings without which a method refuses to run
    "fedbn": {"model": "tiny-bn"},
    "fednova": {"optimizer": "sgd", "momentum": 0.5},
}


@pytest.fixture(scope="module", autouse=True)
def _few(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """An eighth of the digits: enough for several batches of each silo."""
    file = tmp_path_factory.mktemp("data") / "digits.npz"
    x, y = load_digits(return_X_y=True)
    np.savez(file, x=x[:225].reshape(-1, 8, 8).astype(np.uint8) * 15, y=y[:225])
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SIMULATED, "dataset", str(file))
        yield


def run(**changes: Any) -> RoundLoop:
    changes |= NEEDS.get(changes["strategy"], {})
    few: dict[str, Any] = {
        "fedala.max-epochs": 2,
        "fedrep.head-epochs": 2,
        "pfedme.inner-steps": 2,
        "silos": SILOS,
        "optimizer": "adam",
        "optimizer_state": "keep",
    }
    return simulated(**{**few, **changes})


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client.session, "device_of", lambda *_: DEVICE)


def figures(federation: RoundLoop) -> list[Row]:
    return [row for row in federation.history.rows if "seconds" not in row.metric]


@pytest.mark.parametrize("strategy", METHODS)
def test_every_method_gives_the_numbers_of_the_cpu(
    strategy: str, tiny_bn: None, request: pytest.FixtureRequest
) -> None:
    on_cpu = figures(run(strategy=strategy, rounds=2))
    request.getfixturevalue("on_device")
    with phony_device():
        assert figures(run(strategy=strategy, rounds=2)) == on_cpu


@pytest.mark.parametrize("strategy", METHODS)
def test_models_and_data_stay_on_the_device(
    strategy: str, tiny_bn: None, on_device: None
) -> None:
    """A round moves the order of the samples, once per epoch, and reads a few numbers, however many its steps are."""
    crossings = []
    with phony_device():
        # The data stay on the device from run to run
        run(strategy=strategy, rounds=1, evaluate_every=0)
    for rounds, batch_size in ((1, 64), (2, 64), (2, 32)):
        with phony_device() as crossed:
            federation = run(
                strategy=strategy, rounds=rounds, batch_size=batch_size, evaluate_every=0
            )
        crossings.append(crossed)
    samples = max(summary["n_train"] for summary in federation.registration.summaries.values())
    second_round = crossings[1] - crossings[0]
    assert all(scalars <= (samples if way == "in" else SILOS) for way, scalars in second_round)
    assert second_round["in", samples] and second_round["read", 1]
    times = [Counter(way for way, _ in crossed.elements()) for crossed in crossings]
    assert times[1] == times[2]


@pytest.mark.parametrize("strategy", ["apple", "fedala", "fedapm", "fedfomo"])
def test_a_run_goes_on_from_its_files(
    strategy: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    on_cpu = figures(run(strategy=strategy, rounds=4))
    request.getfixturevalue("on_device")
    with phony_device():
        with pytest.raises(Crash):
            run(directory=tmp_path, watch=crash_after(2), strategy=strategy, rounds=4)
        assert (
            figures(run(directory=tmp_path, strategy=strategy, rounds=4, resume=True)) == on_cpu
        )
