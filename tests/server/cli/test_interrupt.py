"""Ctrl-C, whenever it comes: exit code 130, one line, no traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from representatives import seldom

from server.cli import main as module

PROGRAM = Path(sys.executable).with_name("silofl")


def opened(name):
    """Whether a process has begun to load a library."""
    return lambda pid, _: name in Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.parametrize(
    ("moment", "last"),
    [
        (opened("_multiarray_umath"), "silofl: interrupted"),  # NumPy's
        seldom(opened("libtorch_cpu"), "silofl: interrupted"),
        (
            lambda _, out: (out / "progress.jsonl").exists(),
            "silofl simulate: interrupted; continue with silofl simulate",
        ),
    ],
    ids=["NumPy", "PyTorch", "running"],
)
def test_ctrl_c_is_one_line(tmp_path, moment, last):
    out = tmp_path / "run"
    given = "--strategy local --dataset breast-cancer --silos 2 --rounds 100000"
    options = f"{given} --set partition=iid threads=1 --out {out}".split()
    command = [str(PROGRAM), "simulate", *options]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        until = time.monotonic() + 120
        while (
            not moment(process.pid, out) and process.poll() is None and time.monotonic() < until
        ):
            time.sleep(0.002)
        process.send_signal(signal.SIGINT)
        said, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (
        "Traceback" not in errors
        and "Fatal" not in errors
        and "KeyboardInterrupt" not in errors
    )
    assert errors.splitlines()[-1].startswith(last) and said == ""
    assert out.exists() == ("continue" in last)


def frames(*files):
    """A stack of functions in these files, the innermost one first."""
    found = None
    for file in reversed(files):
        found = SimpleNamespace(f_code=SimpleNamespace(co_filename=file), f_back=found)
    return found


def test_an_import_is_not_broken_into(monkeypatch):
    """The process ends at once where the interrupt comes below an import, however deep; else by the exception."""

    def end(code):
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(os, "write", lambda file, text: len(text))
    with pytest.raises(SystemExit) as ended:
        module.on_interrupt(
            2,
            frames(
                "torch/__init__.py",
                "<frozen importlib._bootstrap>",
                "server/simulation/simulate.py",
            ),
        )
    assert ended.value.code == 130
    with pytest.raises(KeyboardInterrupt):
        module.on_interrupt(2, frames("models/training.py", "server/simulation/simulate.py"))


def test_the_command_line_itself_may_be_interrupted(monkeypatch, capsys):
    def parser():
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "parser", parser)
    assert module.main([]) == 130
    assert capsys.readouterr().err == "silofl: interrupted\n"
