"""Fixtures that many tests use. What the tiny federations are: see ``tiny.py``."""

from __future__ import annotations

import gc
import logging
import math
import os
import shutil
import signal
import sys
from functools import lru_cache
from pathlib import Path

import numpy as np
import passive_threads  # noqa: F401  (before PyTorch)
import pytest
import torch
from public_data import DATA
from tiny import forget_models, random_silos, write_silo
from torch import nn

from client import local_data
from client.site.budget import accounting
from models.networks.registry import MODELS, ModelSpec
from partitions.units import describe_units
from server.report.write import try_report
from server.simulation import simulate
from server.simulation.engine import flower_identity

TESTS = Path(__file__).parent
MOST_FILES = 4 << 30  # bytes that the tests' folders may have at a time

gc.disable()  # until everything is imported: see pytest_collection_finish
# A line per silo and round would bury what a failure says.
logging.getLogger("flwr").setLevel(logging.WARNING)
# As in an activated environment: Flower looks for its own programs on PATH.
os.environ["PATH"] = os.pathsep.join(
    [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
)
# Two threads each of several tests that run side by side spend most of their time waiting for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)
# The tests write some hundred thousand small files, and a disk takes longer for each than memory does.
if (
    os.access("/dev/shm", os.W_OK | os.X_OK)
    and shutil.disk_usage("/dev/shm").free > MOST_FILES
    and not os.statvfs("/dev/shm").f_flag & os.ST_NOEXEC
):
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")
# A suite in the background may ignore Ctrl-C, and what the tests start would ignore it, too.
signal.signal(signal.SIGINT, signal.default_int_handler)

# What begins first where several processes run the suite: what takes longest, much of it waiting; then other
# federations. Of the rest no file takes ten seconds, so no process works long when the others have ended.
FIRST = (
    "test_docker.py",
    "test_podman.py",
    "test_proxies.py",
    "test_slurm_cluster.py",
    "test_local_federation.py",
    "test_secure_rounds.py",
    "test_deployed.py",
    "test_link.py",
    "test_every_task.py",
    "test_workers.py",
    "test_resume.py",
    "test_answering.py",
    "test_device.py",
    "test_fresh_machine.py",
    "test_every_method.py",
    "test_private.py",
    "test_coded_runs.py",
    "test_architectures.py",
    "test_special_cases.py",
    "test_states.py",
    "test_report.py",
    "test_tutorial.py",
    "test_own_model.py",
    "test_bad_summaries.py",
    "test_tasks_deployed.py",
    "test_bundle.py",
    "test_tune.py",
    "test_cli.py",
    "test_secure_sums.py",
    "test_lock.py",
    "test_release.py",
    "",
)


def pytest_configure(config):
    """Newer versions of Python warn of other things in other libraries: there, warnings are no errors.

    In the place of "error": a later filter wins, and appended it would print what the filters before it ignore.
    """
    if sys.version_info >= (3, 12):
        filters = config.getini("filterwarnings")
        filters[filters.index("error")] = "default"


def pytest_collection_modifyitems(items):
    """What takes longest begins first."""

    def place(item):
        if item.path.name in FIRST:
            return FIRST.index(item.path.name)
        return len(FIRST) - 1 if item.get_closest_marker("deployed") else len(FIRST)

    items.sort(key=place)


def pytest_collection_finish():
    """Libraries and tests are here to stay: the collector need not look through them again and again."""
    gc.freeze()
    gc.set_threshold(20_000)  # not 700: a run makes and drops as many objects for each message
    gc.enable()
    # pytest's handlers go to every logger that does not hand on to the root, at each of a test's phases: torch has 40.
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch.") and isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.fixture(scope="session")
def data_dir():
    """Where the public data sets lie: SILOFL_DATA, or beside the repository. Skips where there are none."""
    if not DATA.is_dir():
        pytest.skip(f"no data sets at {DATA}: set SILOFL_DATA")
    return DATA


@pytest.fixture(autouse=True)
def _one_thread():
    """A run sets the threads of the whole process; give the next test what it started with."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def _power_stays_on():
    """What this process writes need not be on the disk to be read again; waiting for that takes half of many a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        # The site reads a data file in a process of its own, which takes a second
        patch.setattr(accounting, "read_by_process", describe_units)
        yield


@pytest.fixture(scope="session", autouse=True)
def _reports_are_written_where_they_are_read():
    """A simulation ends with its report, whose pictures take a second of many a test; an error in it fails no run."""

    def write_where_read(path):
        file = os.environ["PYTEST_CURRENT_TEST"].partition("::")[0]
        if "report.html" in (TESTS.parent / file).read_text("utf-8"):
            try_report(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulate, "try_report", write_where_read)
        yield


@pytest.fixture(scope="session", autouse=True)
def _files_are_read_once():
    """A process of a hospital has one silo; this one has up to a dozen, and each keeps its data as there."""
    local_data._own_file = lru_cache(32)(local_data._own_file.__wrapped__)


@pytest.fixture
def identity():
    """Messages that a test makes have what Flower gives those of a run."""
    with flower_identity():
        yield


@pytest.fixture
def no_search():
    """Python's search for cycles comes late: what is in one stays until then, so a model must not be."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def pair(tmp_path):
    """The two silos of the hand-worked tests, one column, two classes: a has (2 -> class 0), b three times (1 -> 1)."""
    return {
        "a": write_silo(tmp_path / "a.npz", [[2]], [0]),
        "b": write_silo(tmp_path / "b.npz", [[1], [1], [1]], [1, 1, 1]),
    }


@pytest.fixture
def two(tmp_path):
    """Two random silos of 6 and 10 rows: three columns, three classes, Σ = 12."""
    return random_silos(tmp_path, [6, 10])


@pytest.fixture
def three(tmp_path):
    """Three random silos of 6, 10 and 8 rows: three columns, three classes, Σ = 12."""
    return random_silos(tmp_path, [6, 10, 8])


@pytest.fixture
def lopsided(tmp_path):
    """Classes: a has 0 and 1, b has 1 and 2 with other numbers, c has 0 alone."""
    rng = np.random.default_rng(4)
    labels = {"a": [0, 0, 1, 0, 1], "b": [1, 2, 2, 1, 2, 1, 1], "c": [0, 0, 0]}
    return {
        name: write_silo(tmp_path / f"{name}.npz", rng.normal(size=(len(y), 3)), y, 3)
        for name, y in labels.items()
    }


@pytest.fixture
def zero_start(monkeypatch):
    """All initial models are zero: softmax gives 1/2 to each of two classes, and round 1 can be done in the head."""
    import client.session
    import models.initialisation
    import server.run.loop

    made = models.initialisation.initial_model

    def zero(*arguments):
        return lambda purpose: torch.zeros_like(made(*arguments)(purpose))

    monkeypatch.setattr(client.session, "initial_model", zero)
    monkeypatch.setattr(server.run.loop, "initial_model", zero)
    yield
    monkeypatch.undo()
    forget_models()


class TinyBatchNorm(nn.Module):
    """Linear, BatchNorm, linear, with 4 hidden units; running statistics are 8 buffer scalars."""

    def __init__(self, inputs, classes):
        super().__init__()
        self.fc1 = nn.Linear(inputs, 4)
        self.norm = nn.BatchNorm1d(4)
        self.fc2 = nn.Linear(4, classes)

    def forward(self, x):
        return self.fc2(torch.relu(self.norm(self.fc1(x.flatten(1)))))


@pytest.fixture
def tiny_bn(monkeypatch):
    """Makes ``tiny-bn``, a network with running statistics, known by name."""
    spec = ModelSpec(
        "tiny",
        "tests",
        "any input",
        lambda s, classes, _: TinyBatchNorm(math.prod(s), classes),
        kinds=("table", "picture", "volume"),
    )
    monkeypatch.setitem(MODELS, "tiny-bn", spec)
    yield
    forget_models()
