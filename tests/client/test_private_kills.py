"""kill -9 in every phase of a private message: repeated and resumed it has the same bits, and is charged at least once.

What may have left is always charged: at no moment is less in the ledger than the server may know.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from dying import COMMAND, PHASES

ROOT = Path(__file__).parents[2]
HELPERS = ROOT / "tests/helpers"


@pytest.fixture(scope="module")
def deaths(tmp_path_factory):
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, HELPERS))),
    }
    command = [sys.executable, "-c", COMMAND, str(tmp_path_factory.mktemp("dying"))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {one["phase"]: one for one in found}


@pytest.mark.exhaustive
@pytest.mark.parametrize("phase", PHASES)
def test_killed_in_each_phase(deaths, phase):
    one, whole = deaths[phase], deaths[""]
    assert one["status"] == signal.SIGKILL
    killed = one["killed"]
    # Nothing is trained, noted or logged without a charge.
    assert (
        killed["charges"] == (phase != "before the charge")
        and killed["noted"] <= killed["charges"]
    )
    assert killed["logged"] <= killed["noted"] and killed["logged"] == (
        phase == "as the reply leaves"
    )
    assert one["equal"] and one["again"]["charges"] == 1
    assert one["again"]["steps"] == whole["again"]["steps"] == [4]


@pytest.mark.parametrize("phase", ["", *PHASES])
def test_a_resumed_run_sends_the_same_bits_and_is_charged_again(deaths, phase):
    assert deaths[phase]["resumed equal"] and deaths[phase]["resumed"]["charges"] == 2
