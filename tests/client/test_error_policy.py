"""Whose error it is: the user's goes to the server as it is, a fault of the program without what it is about."""

from __future__ import annotations

import ast
import errno
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, RecordDict
from tiny import federate

from client import app as answer
from client.app import app
from client.faults import OURS, explain
from client.protocol.parsed import SiteError
from partitions.common.errors import DataError, UserError
from server.run.loop import Progress
from server.simulation.engine import flower_identity
from server.simulation.simulate import simulate
from strategies.base.client import SiloClient
from strategies.scaffold import Scaffold

SECRET = "clinic.npz: patient 4711"


@pytest.fixture
def silo_a_fails(three, monkeypatch):
    """Run a federation in whose round 2 silo a does this as it trains; return why the round is without it."""
    train = SiloClient.train

    def failing(do):
        def trains(self, **options):
            if (self.silo.name, self.round) == ("a", 2):
                do()
            train(self, **options)

        monkeypatch.setattr(SiloClient, "train", trains)
        seen: list[Progress] = []
        federate(three, strategy="fedavg", rounds=2, watch=seen.append)
        assert not seen[0].rejected and set(seen[1].rejected) == {"a"}
        return seen[1].rejected["a"]

    return failing


def throw(error):
    def do():
        raise error

    return do


@pytest.mark.parametrize("kind", [UserError, DataError, SiteError])
def test_the_users_errors_reach_the_server_as_they_are(silo_a_fails, kind, caplog):
    assert (
        silo_a_fails(throw(kind("learning-rate = 9: lower it")))
        == "learning-rate = 9: lower it"
    )
    assert not any(record.exc_info for record in caplog.records)


def test_so_does_a_disk(silo_a_fails):
    assert silo_a_fails(throw(OSError("the disk is gone"))) == "OSError: the disk is gone"


OUT_OF_MEMORY = [
    (lambda: torch.empty(1 << 60), "cpu"),
    (lambda: np.empty(1 << 56), "cpu"),
    (throw(MemoryError()), "cpu"),
    (throw(OSError(errno.ENOMEM, "Cannot allocate memory")), "cpu"),
    (
        throw(
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"
            )
        ),
        "cpu",
    ),
    (
        throw(
            torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ..."
            )
        ),
        "cuda",
    ),
    (
        throw(
            RuntimeError(
                "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
            )
        ),
        "cuda",
    ),
]


@pytest.mark.parametrize(("do", "device"), OUT_OF_MEMORY)
def test_memory_that_ran_out_is_one_line_with_what_to_lower(silo_a_fails, do, device, caplog):
    line = silo_a_fails(do)
    assert re.fullmatch(
        rf"out of memory on .*\(device = {device}\): lower batch-size \(it is \d+\), .*", line
    )
    assert not any(record.exc_info for record in caplog.records)  # and no traceback
    with pytest.raises(Exception) as error:
        do()
    assert explain(error.value) == (2, re.sub(r" \(it is \d+\)", "", line))


def test_a_simulation_ends_where_its_silos_have_no_memory(tmp_path, monkeypatch):
    """Its silos share the user's machine: without a silo its numbers would be others."""
    monkeypatch.setattr(SiloClient, "train", lambda *_, **__: torch.empty(1 << 60))
    with pytest.raises(UserError, match=r"^out of memory on .*batch-size \(it is 7\)"):
        simulate(
            {
                "dataset": "breast-cancer",
                "rounds": 1,
                "silos": 2,
                "batch-size": 7,
                "out": str(tmp_path / "r"),
            },
            quiet=True,
        )


@pytest.mark.parametrize(
    ("do", "kind"),
    [
        (throw(ValueError(SECRET)), "ValueError"),
        (throw(RuntimeError(SECRET)), "RuntimeError"),
        (lambda: np.zeros(2).reshape(int(SECRET[-4:])), "ValueError"),
        (lambda: dict[str, int]()[SECRET], "KeyError"),
    ],
)
def test_a_fault_reaches_it_without_the_silos_values(silo_a_fails, do, kind, caplog):
    """The server reads the error's type and the place in our code; the silo's log has the traceback, at ERROR."""
    reason = silo_a_fails(do)
    assert re.fullmatch(
        rf"{kind} in strategies/base/contract\.py:\d+: a fault of the program; [^\n]*", reason
    )
    assert "4711" not in reason
    logged = [record for record in caplog.records if record.exc_info]
    assert [record.levelno for record in logged] == [logging.ERROR] and "4711" in logged[
        0
    ].getMessage()


@pytest.mark.parametrize(
    "error", [ValueError("shapes"), UserError("a setting"), TypeError("None"), KeyError("x")]
)
def test_a_fault_in_a_methods_check_ends_the_run(three, monkeypatch, error):
    """Before, every silo was left out for it."""

    def check(self, update):
        raise error

    monkeypatch.setattr(Scaffold, "check", check)
    with pytest.raises(type(error)) as caught:
        federate(three, strategy="scaffold", rounds=2)
    assert caught.value is error
    assert explain(error)[0] == (2 if isinstance(error, UserError) else 1)


def test_a_silo_is_blamed_for_its_numbers_alone(three):
    def lie(silo, message, reply):
        if silo == "a" and message.metadata.message_type == "train":
            config = reply.content["config"]
            config["number.steps"] = -1
        return reply

    seen: list[Progress] = []
    options = {"rounds": 2, "watch": seen.append, "scaffold__up": "model"}
    federate(three, "scaffold", **options, prepare=lambda grid: setattr(grid, "after", lie))
    assert [p.rejected for p in seen[:2]] == [
        {"a": "'steps' is -1, not a whole number from 0 to inf"}
    ] * 2


@pytest.mark.parametrize("kind", [UserError, DataError])
def test_settings_that_cannot_be_read_lose_no_reply(tmp_path, monkeypatch, kind):
    """They are read again to note the reason for ``silofl watch``."""

    def unreadable(run):
        raise kind("init-weights = w: it is no file of weights")

    monkeypatch.setattr(answer, "parse_settings", unreadable)
    node: Any = {"name": "a", "state-dir": str(tmp_path)}
    with flower_identity():
        message = Message(RecordDict(), dst_node_id=1, message_type="query")
        reply = app(
            message, Context(1, 1, node, RecordDict(), {"strategy": "fedavg", "seed": 4711})
        )
    assert (
        reply.has_error() and reply.error.reason == "init-weights = w: it is no file of weights"
    )


ROOT = Path(__file__).parents[2]
BARE = ("ValueError", "RuntimeError")
# By the only function that calls it
CAUGHT = {"partitions/common/settings.py", "client/link/route.py", "client/flower/service.py"}


def names_in(nodes):
    """Of these and all below them, the nodes that are names."""
    return {
        id(n)
        for node in nodes
        if node is not None
        for n in ast.walk(node)
        if isinstance(n, ast.Name)
    }


def bare(tree):
    """Where a bare type is raised or handed on, and not caught in the same function."""
    fine = set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            fine |= names_in([node.type])
        elif isinstance(node, ast.ClassDef):
            fine |= names_in(node.bases)
        elif isinstance(node, ast.AnnAssign):
            fine |= names_in([node.annotation])
        elif isinstance(node, ast.Call) and re.search(
            "suppress|isinstance", ast.dump(node.func)
        ):
            fine |= names_in(node.args)
        elif isinstance(node, ast.Try) and any(
            "ValueError" in ast.dump(h.type) for h in node.handlers if h.type
        ):
            fine |= names_in(node.body)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in BARE and id(node) not in fine:
            yield node


def test_no_error_of_ours_has_a_type_that_says_nothing():
    """A `ValueError` or `RuntimeError` of ours would end with exit code 1 and a traceback, as a fault of silofl."""
    paths = [path for room in (*OURS, "docker") for path in (ROOT / room).rglob("*.py")]
    found = [
        f"{path.relative_to(ROOT).as_posix()}:{n.lineno}"
        for path in paths
        for n in bare(ast.parse(path.read_text()))
    ]
    assert {place for place in found if place.split(":")[0] not in CAUGHT} == set()


def test_a_bare_error_is_found():
    caught = "try:\n    raise ValueError\nexcept (ValueError, KeyError):\n    pass\n"
    assert not list(bare(ast.parse(caught)))
    lines = {
        n.lineno
        for n in bare(ast.parse(caught + "raise ValueError('no')\nkind = RuntimeError\n"))
    }
    assert lines == {5, 6}
