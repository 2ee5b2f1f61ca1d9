"""The inventory of Flower's internals is whole: no code of ours reaches them any other way."""

from __future__ import annotations

import ast
import importlib
import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from failing import fails
from flwr.app import Array, Metadata
from flwr.server.superlink.linkstate import LinkState
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid.http_grid import HttpGrid

from client.flower.internals import INTERNALS, internal

ROOT = Path(__file__).parents[3]
ROOM = "client/flower/"
INVENTORY = f"{ROOM}internals.py"
# The transport's Array, whose conformance test is test_payload.py
EXCEPTED = {"strategies/base/transport/payload.py": ["_chunks"]}
PUBLIC = {
    *(
        "flwr",
        "flwr.app",
        "flwr.client",
        "flwr.clientapp",
        "flwr.common",
        "flwr.serverapp",
        "flwr.serverapp.strategy",
    ),
    *("flwr.server", "flwr.server.strategy"),  # the plain app of a benchmark
}
MODULE = re.compile(r"(?<![\w.])flwr(?:\.[a-z_]\w*)+")


@cache
def files():
    """Every Python file of ours that is no test and could use Flower: what has neither word does not."""
    rooms = ("models", "partitions", "strategies", "client", "server", "docker", "benchmarks")
    paths = sorted(path for room in rooms for path in (ROOT / room).rglob("*.py"))
    texts = ((path, path.read_text("utf-8")) for path in paths)
    return [
        (path.relative_to(ROOT).as_posix(), ast.parse(t))
        for path, t in texts
        if "flwr" in t or "internal" in t
    ]


def internals_in(tree):
    """What a file reaches of Flower past its public names: by import, by attribute, or by a module's name in a text."""
    # Docstrings
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (
                name.name
                for name in node.names
                if name.name.startswith("flwr.") and name.name not in PUBLIC
            )
        elif (
            isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "flwr"
        ):
            module = str(node.module)
            public = importlib.import_module(module).__all__ if module in PUBLIC else ()
            yield from (
                f"{module}:{name.name}" for name in node.names if name.name not in public
            )
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "flwr"
        ):
            if node.attr != "__version__":
                yield f"flwr.{node.attr}"
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in texts
        ):
            yield from (name for name in MODULE.findall(node.value) if name not in PUBLIC)


def test_the_code_reaches_flowers_internals_through_the_inventory_alone():
    found = {path: sorted(set(internals_in(tree))) for path, tree in files()}
    assert len(found.pop(INVENTORY)) > 20
    assert {path: names for path, names in found.items() if names} == {}


@cache
def private_names():
    """What Flower's messages, arrays, ids and Grids keep for themselves."""
    metadata = Metadata(1, "", 1, 1, "", "", 0.0, 1.0, "train")
    array = vars(Array(np.zeros(1))).keys() | {"_chunks"}
    names = vars(metadata).keys() | vars(TaskIdentity).keys() | vars(HttpGrid).keys() | array
    names |= {name for name in dir(LinkState) if name.startswith("_")} | {"_runtime_client"}
    ours = {"_push", "_pull", "_records", "_run"}  # methods of our own classes
    return {name for name in names - ours if re.match(r"_[a-z]", name)}


def private_in(tree):
    """Private names of Flower's objects in a file: as an attribute, or as a text, for `__dict__` and `setattr`."""
    for node in ast.walk(tree):
        name = None
        if isinstance(node, ast.Attribute) and not (
            isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        ):
            name = node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value
        elif isinstance(node, ast.keyword):
            name = node.arg
        if name in private_names():
            yield name
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            key, of = str(node.slice.value), node.value
            if isinstance(of, ast.Attribute) and of.attr == "__dict__" and key[:1] == "_":
                yield key


def test_one_folder_alone_touches_flower_beyond_its_exports():
    outside = [(path, tree) for path, tree in files() if not path.startswith(ROOM)]
    touched = {path: sorted({*private_in(tree)}) for path, tree in outside}
    assert {path: names for path, names in touched.items() if names} == EXCEPTED
    for path, tree in outside:
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                assert not str(node.module).endswith("flower.internals"), path
                assert "internals" not in {alias.name for alias in node.names}, path


@pytest.mark.parametrize(
    "code",
    [
        'message.metadata.__dict__["_message_id"] = "1"',
        'message.metadata.__dict__ |= {"_src_node_id": 1}',
        "metadata.__dict__.update(_message_type='train')",
        "grid._runtime_client.GetNodes()",
        "setattr(identity, '_task_id', 1)",
        'record.__dict__["_new_in_the_next_release"] = 1',
    ],
)
def test_a_private_name_would_be_found(code):
    assert [*private_in(ast.parse(code))]


@pytest.mark.parametrize(
    "code",
    [
        "import flwr.supercore.utils",
        "from flwr.supercore.utils import get_flwr_home",
        "from flwr.common import GRPC_MAX, log",
        "import flwr\nflwr.supercore.utils",
        "import importlib\nimportlib.import_module('flwr.supernode.runtime.run_clientapp')",
        "command = ['-c', 'from flwr.cli.app import app; app()']",
    ],
)
def test_another_way_would_be_found(code):
    assert list(internals_in(ast.parse(code)))


def test_public_names_are_no_internals():
    code = (
        '"""As flwr.supernode does."""\nimport flwr\nfrom flwr.app import Message\n'
        'print(flwr.__version__, "flwr.app")'
    )
    assert list(internals_in(ast.parse(code))) == []


def test_every_row_is_used_and_every_use_has_its_row():
    used = set()
    for _, tree in files():
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id == "internal"
            ):
                (name,) = node.args
                assert isinstance(name, ast.Constant) and isinstance(name.value, str), ast.dump(
                    node
                )
                used.add(name.value)
    assert used == INTERNALS.keys()


@pytest.mark.parametrize("name", INTERNALS)
def test_the_installed_flower_has_it(name):
    assert internal(name) is not None


def test_a_name_that_flower_has_moved_is_an_error_at_once(monkeypatch):
    monkeypatch.delattr("flwr.supercore.task_identity.TaskIdentity")
    fails(AttributeError, "TaskIdentity", internal, "TaskIdentity")


def test_who_a_process_is_has_three_parts():
    """`client.flower.messages.set_identity` sets them."""
    assert {"_task_id", "_run_id", "_node_id"} <= vars(TaskIdentity).keys()


def rows(columns: int) -> list[tuple[str, ...]]:
    """Cells of the tables of so many columns in the page's section on Flower's internals."""
    page = (ROOT / "docs/decisions.md").read_text("utf-8").partition("## Flower internals")[2]
    lines = [
        tuple(line.strip("| ").split(" | ")) for line in page.splitlines() if line[:1] == "|"
    ]
    return [cells for cells in lines if len(cells) == columns and "---" not in cells[0]]


def test_the_documents_table_is_the_inventory():
    """It also says what each name is for, and what breaks when Flower moves it."""
    listed = [row for row in rows(4) if ":" in row[1] or row[1].startswith("`flwr")]
    assert {name.strip("`"): where.strip("`") for name, where, *_ in listed} == INTERNALS
    assert all(all(cell.strip() for cell in row) for row in listed)


def test_each_habit_names_a_test_that_is_there():
    tests = {path: path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py")}
    habits = [row[3].strip("`") for row in rows(4) if row[3].startswith("`test_")]
    assert len(habits) > 5
    for name in habits:
        assert any(
            name in (path.name, *re.findall(r"^def (\w+)", text, re.MULTILINE))
            for path, text in tests.items()
        )
