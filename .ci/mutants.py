"""Which faults of one place do the tests catch? Places are drawn from the product's syntax trees.

    make install && .venv/bin/python .ci/mutants.py --map          once: which test reaches which line (coverage)
    .venv/bin/python .ci/mutants.py --each 60 [GLOB...]            then, evenly over the five packages, or over GLOBs

A mutant changes one comparison, operator, number, truth value or `raise` of a function in a copy of the working tree.
The tests that reach its line run on it, the shortest first, up to the first that fails; `--all` runs every one of them.
`--out` takes a line of JSON for each mutant: place, change, the tests that fail. A mutant without one survives, and a
test that is a mutant's only one must not go. Some survivors mean the same as the original. Two trees with the same
product are compared by the survivors of the same draw.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import coverage
import numpy  # noqa: F401  (imported here, they are there in every fork)
import pytest
import torch  # noqa: F401

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("models", "partitions", "strategies", "client", "server")
PAIRS = (
    *(
        (ast.Lt, ast.LtE),
        (ast.Gt, ast.GtE),
        (ast.Eq, ast.NotEq),
        (ast.In, ast.NotIn),
        (ast.Is, ast.IsNot),
    ),
    *((ast.And, ast.Or), (ast.Add, ast.Sub), (ast.Mult, ast.Div)),
)
SWAPS: dict[type, type] = {a: b for pair in PAIRS for a, b in (pair, pair[::-1])}
MOST_SECONDS = 60.0  # of tests on one mutant; those beyond are not run


def changes(tree: ast.Module) -> Iterator[tuple[ast.expr | ast.stmt, ast.AST]]:
    """Each node of a module's functions that can be changed, with what stands in its place."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for node in {
        id(node): node for f in functions for one in f.body for node in ast.walk(one)
    }.values():
        match node:
            case ast.Compare(left, [op], right) if type(op) in SWAPS:
                yield node, ast.Compare(left, [SWAPS[type(op)]()], right)
            case ast.BinOp(left, op, right) if type(op) in SWAPS:
                yield node, ast.BinOp(left, SWAPS[type(op)](), right)
            case ast.BoolOp(op, values):
                yield node, ast.BoolOp(SWAPS[type(op)](), values)
            case ast.UnaryOp(ast.Not(), operand):
                yield node, operand
            case ast.Constant(bool() as value):
                yield node, ast.Constant(not value)
            case ast.Constant(int() | float() as value):
                yield node, ast.Constant(value + 1)
            case ast.Raise():
                yield node, ast.Pass()


def mutants(paths: list[Path], each: int, seed: int) -> list[tuple[Path, int, str, str, str]]:
    """Draw places: the file, the line, what stands there, what comes in its place, and the file's new text."""
    places = []
    for path in paths:
        lines = path.read_text("utf-8").splitlines(keepends=True)
        for node, new in changes(ast.parse("".join(lines))):
            first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
            head = lines[first].encode()[: node.col_offset].decode()
            tail = lines[last].encode()[node.end_col_offset :].decode()
            other = ast.unparse(ast.fix_missing_locations(new))
            other = f"({other})" if isinstance(node, ast.expr) else other
            changed = "".join([*lines[:first], head, other, tail, *lines[last + 1 :]])
            places.append((path, node.lineno, ast.unparse(node), other, changed))
    random.Random(seed).shuffle(places)
    return [place for place in places if parses(place[-1])][:each]


def parses(text: str) -> bool:
    """Whether a text is a module: inside a formatted text not every change is one."""
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


class Watcher:
    """A plugin of pytest that collects which tests fail, and how long each takes."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        self.seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)


def failing(tree: Path, tests: list[str], every: bool, limit: int) -> list[str]:
    """Run tests of a tree in a fork of this process, which has imported what takes long, and list what fails."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        os.setsid()
        os.chdir(tree)
        sys.path.insert(0, str(tree))
        void = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(void, stream)
        watcher, code = Watcher(), 1
        with contextlib.suppress(BaseException):
            options = [
                "-q",
                "-p",
                "no:cacheprovider",
                f"--timeout={limit}",
                *([] if every else ["-x"]),
            ]
            code = pytest.main([*options, *tests], plugins=[watcher])
        names = watcher.failed or ([f"exit code {int(code)}"] if code else [])
        os.write(writing, json.dumps(names[:100]).encode()[:60000])
        os._exit(0)
    os.close(writing)
    signal.signal(signal.SIGALRM, lambda *_: os.killpg(child, signal.SIGKILL))
    signal.alarm(limit)
    with os.fdopen(reading, "rb") as answer:
        text = answer.read()
    signal.alarm(0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return list(json.loads(text)) if text else ["it took too long, or died"]


def write_map(file: Path) -> int:
    """Run the suite in this process under coverage, and write which tests reach which line, and their seconds."""
    with tempfile.TemporaryDirectory() as folder:
        data, watcher = str(Path(folder) / "coverage"), Watcher()
        os.environ["COVERAGE_FILE"] = data
        code = pytest.main(
            ["-q", "--cov", "--cov-context=test", "--cov-report=", *sys.argv[2:]],
            plugins=[watcher],
        )
        seen = coverage.CoverageData(data)
        seen.read()
        lines: dict[str, dict[int, list[str]]] = {}
        for name in seen.measured_files():
            reached = seen.contexts_by_lineno(name).items()
            tests = {
                n: sorted({c.partition("|")[0] for c in contexts} - {""})
                for n, contexts in reached
            }
            lines[Path(name).resolve().relative_to(ROOT).as_posix()] = tests
    file.write_text(json.dumps({"lines": lines, "seconds": watcher.seconds}))
    return int(code)


def copy_tree(tree: Path) -> None:
    """Copy what git has of the working tree."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for name in filter(None, listed.split("\0")):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name)
    if (ROOT.parent / "shared").exists():
        (tree.parent / "shared").symlink_to((ROOT.parent / "shared").resolve())


def main() -> int:
    """Draw mutants, and print which are caught."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "glob", nargs="*", default=[f"{package}/**/*.py" for package in PACKAGES]
    )
    parser.add_argument(
        "--map", action="store_true", help="write which tests reach which line, and end"
    )
    parser.add_argument("--each", type=int, default=60, help="mutants of a GLOB (60)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--all", action="store_true", help="run every test that reaches a mutant"
    )
    parser.add_argument("--limit", type=int, default=300, help="seconds for one mutant (300)")
    parser.add_argument("--out", type=Path, default=ROOT / "mutants.jsonl")
    options, _ = parser.parse_known_args()
    os.environ.update(OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1")
    reached = ROOT / "mutants.map.json"
    if options.map:
        return write_map(reached)
    known = json.loads(reached.read_text())
    caught = survived = unreached = 0
    with (
        tempfile.TemporaryDirectory() as folder,
        options.out.open("a", encoding="utf-8") as out,
    ):
        tree = Path(folder) / "tree"
        copy_tree(tree)
        for glob in options.glob:
            for path, line, old, new, text in mutants(
                sorted(ROOT.glob(glob)), options.each, options.seed
            ):
                name = path.relative_to(ROOT).as_posix()
                tests = sorted(
                    known["lines"].get(name, {}).get(str(line), []), key=known["seconds"].get
                )
                total = 0.0
                chosen = [
                    test
                    for test in tests
                    if (total := total + known["seconds"][test]) < MOST_SECONDS
                ]
                by = []
                if chosen:
                    (tree / name).write_text(text, "utf-8")
                    by = failing(tree, chosen, options.all, options.limit)
                    shutil.copy2(path, tree / name)
                row = {
                    "place": f"{name}:{line}",
                    "was": old,
                    "is": new,
                    "reached": len(tests),
                    "by": by,
                }
                out.write(json.dumps(row) + "\n")
                out.flush()
                caught = caught + bool(by)
                survived = survived + (not by)
                unreached = unreached + (not tests)
                print(
                    f"{'caught  ' if by else 'SURVIVES'} {row['place']}: {old} -> {new}",
                    flush=True,
                )
    print(
        f"{caught} caught, {survived} survive, {unreached} of them on lines that no test reaches in its own process"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
