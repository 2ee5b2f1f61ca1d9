"""A silo whose app runs in jobs of a real Slurm, which have no network."""

import json

import pytest
from slurm_cluster import inside

from client.site.runtime.worker import TOO_LATE

pytestmark = [pytest.mark.network, pytest.mark.deployed, pytest.mark.timeout(600)]


def test_a_silo_that_waits_and_is_preempted_has_the_history_of_one_that_is_not(tmp_path):
    """Then a hospital joins by its bundle; its job is cancelled, and it leaves."""
    told = json.loads(inside("queue_and_preempt", tmp_path).splitlines()[-1])
    assert told["same"]
    assert "queued (" in told["log"] and "DUE TO PREEMPTION" in told["log"]
    assert {line.split()[0] for line in told["log"].splitlines() if "LOOPBACK" in line} == {
        "lo"
    }
    assert " UP " not in told["log"]
    code, line = told["refused"]
    assert code == 2 and "Slurm: allocation failure: Invalid partition" in line
    assert "was cancelled (scancel)" in told["cancelled"]
    assert told["left"] == ""


def test_each_fault_of_a_job_has_its_line(tmp_path):
    told = json.loads(inside("faults", tmp_path).splitlines()[-1])
    assert told["late"] == TOO_LATE
    for name, words in {
        "scancel": "was cancelled (scancel)",
        "exit": "is FAILED: ClientApp process left with exit code 3 and without a reply",
        "partition": "Slurm took no job: sbatch: error: Batch job submission failed: Invalid partition",
        "check": "Invalid partition name specified",
        "good": "takes jobs with low --gres=gpu:1",
        "disk of the job": "found the disk of its state folder full",
        "disk": "the disk of its state folder is full",
        "not shared": "never began: its node must see the state folder",
    }.items():
        assert words in told[name], (name, told[name])
    # What a dead SuperNode had left, and what this one leaves
    assert told["old"] == "CANCELLED"
    assert told["left"] in ("", "COMPLETING")
