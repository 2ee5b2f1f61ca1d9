"""A silo whose app runs in jobs of a real Slurm, which have no network."""

import json

import pytest
from slurm_cluster import inside

from client.site.runtime.worker import TOO_LATE

pytestmark = [pytest.mark.network, pytest.mark.deployed, pytest.mark.timeout(1200)]


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


def test_several_devices_train_on_one_node_and_on_two(tmp_path):
    """With the bits of one process; on one node all listen on loopback alone. A dead process costs a round."""
    told = json.loads(inside("several_devices", tmp_path).splitlines()[-1])
    for name, second in (("one", "node1"), ("two", "node2")):
        processes = [["node1", "0"], [second, "1"]]
        assert told[name][:3] == [True, processes, name == "two"]
        _, seen, _, progress = told[f"{name}, killed"]
        assert seen == processes and "192.0.2" not in progress
        _, reason = progress.split('"rejected": {"hospital-02": "')
        ways = "process was ended by SIG", "a process of the silo has ended: Connection closed"
        assert any(words in reason.partition('"')[0] for words in ways)
        assert '"silos": 2,' in progress and '"silos": 3,' in progress
    assert "device = cpu,cpu: not for moon, whose loss depends on" in told["refused"]
