"""What happens on the cluster of `slurm_cluster.py`; each function prints what its test looks at."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from slurm_cluster import ADDRESS, NODE
from supernode import NodeSilo
from trio import (
    FEDERATION,
    RUN,
    bring_up,
    is_online,
    rows,
    start_over,
    start_run,
    text_of,
    wait_for,
)

from client.protocol.keys import site_root
from client.protocol.launch import FLOWER
from client.site.runtime import slurm
from client.site.runtime.doctor import slurm_check
from client.site.runtime.slurm import OPTIONS, SlurmJobs
from partitions.common.errors import RunFailedError
from server.deploy import processes, submit
from server.deploy.local import LocalFederation
from server.simulation.simulate import simulate

NAME = "hospital-02"
SILOFL = (sys.executable, "-m", "server.cli.main")
# Each round trains for some seconds, in which its job is preempted
SLOW: dict[str, Any] = {**RUN, "strategy": "fedper", "rounds": 2, "local-epochs": 300}


def federation(folder: Path, silo: str = "data: demo") -> LocalFederation:
    own = {"XDG_STATE_HOME": str(folder / "state"), "FLWR_HOME": str(folder / "flower")}
    os.environ |= {**own, **FLOWER}
    (folder / "federation.yaml").write_text(
        FEDERATION.format(name="trio").replace("data: demo", silo)
    )
    return bring_up(folder)


def say(*command: str) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.strip()


def submit_job(partition: str, seconds: int, *options: str) -> str:
    script = f"--wrap=sleep {seconds}"
    return say("sbatch", "--parsable", "--gres=gpu:1", "-p", partition, *options, script)


def ours(field: str = "State") -> str:
    """A field of the silo's job."""
    listed = say("squeue", "--noheader", "--partition=low", f"--Format=Name:30,{field}")
    jobs = [line.split() for line in listed.splitlines() if line.startswith("silofl-")]
    return jobs[-1][-1] if jobs else ""


def job_processes() -> dict[tuple[str, str], int]:
    """A job's processes that train, by node and place in the group."""
    processes = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_text().split("\0")
            pairs = (folder / "environ").read_text().split("\0")
            # `srun` has the same words, and the job's first process one less
            if "site.runtime.slurm" in words and words[0] != "srun" and len(words) > 7:
                variables = dict(pair.partition("=")[::2] for pair in pairs)
                place = variables["SLURMD_NODENAME"], variables["SLURM_PROCID"]
                processes[place] = int(folder.name)
    return processes


def listens_beyond() -> bool:
    """Whether any process listens at this machine's own address."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    return any(w[3] == "0A" and w[1].startswith("050200C0") for w in lines)


def several_devices(folder: Path) -> None:
    """Two processes of one silo on one node, then on two, where the second dies; and a run that is refused."""
    (folder / "hosts").write_text(f"{ADDRESS} {NODE}\n")
    say("mount", "--bind", str(folder / "hosts"), "/etc/hosts")
    (folder / "slurm/alone").write_text('#!/bin/sh\nexec "$@"\n')
    run = {**RUN, "strategy": "ditto", "rounds": 2, "local-epochs": 5}
    simulate({**run, "accumulate": 2, "silos": 3, "out": str(folder / "here")}, quiet=True)
    running = federation(folder, "data: demo, device: [cpu, cpu]")
    told: dict[str, Any] = {}

    def train(name: str, *, kill: bool = False, **settings: Any) -> None:
        follower = start_run({**run, **settings}, folder / name)
        seen: set[tuple[str, str]] = set()
        beyond = False
        while follower.is_alive():
            processes = job_processes()
            seen |= {*processes}
            beyond = beyond or listens_beyond()
            if kill and len(processes) == 2:
                os.kill(processes[max(processes)], signal.SIGKILL)
                kill = False
            time.sleep(0.05)
        same = rows(folder / name) == rows(folder / "here")
        text = text_of(folder / name / "progress.jsonl")
        told[name] = [same, sorted(seen), beyond, text]

    for name, options in (("one", "low"), ("two", "both --nodes=2 --ntasks-per-node=1")):
        start_over(running, running.fleet_port, NAME, environment={OPTIONS: options})
        wait_for(lambda: is_online(running, NAME), 180)
        train(name)
        train(f"{name}, killed", kill=True, **{"local-epochs": 50})
    with pytest.raises(RunFailedError) as refused:
        submit.run({**RUN, "strategy": "moon", "out": str(folder / "moon")})
    told["refused"] = str(refused.value)
    print(json.dumps(told))
    processes.end(processes.find(running.directory), grace=1.0)


def queue_and_preempt(folder: Path) -> None:
    """A run where all silos compute at once, and one where the second waits in a queue, and is preempted."""
    running = federation(folder)
    alone = submit.run({**SLOW, "out": str(folder / "alone")})
    first = submit_job("low", 600)
    start_over(running, running.fleet_port, NAME, environment={OPTIONS: "low --gres=gpu:1"})
    wait_for(lambda: is_online(running, NAME), 180)
    out = folder / "queued"
    follower = start_run(SLOW, out)
    wait_for(lambda: ours() == "PENDING", 180)
    second = submit_job("low", 600)
    say("scancel", first)
    wait_for(lambda: f"{NAME} is queued at its site" in text_of(out / "progress.jsonl"), 180)
    say("scancel", second)
    wait_for(lambda: ours() == "RUNNING" and bool(list(folder.rglob("answer.new*"))), 180)
    submit_job("high", 3)
    wait_for(lambda: ours("RestartCnt") == "1", 180)
    follower.join()
    log = text_of(running.directory / "logs" / f"{NAME}.log")
    # Without Slurm again
    start_over(running, running.fleet_port, NAME)
    told = {"same": rows(out) == rows(alone), "log": log, **cancel(running, folder)}
    print(json.dumps(told))
    processes.end(processes.find(running.directory), grace=1.0)


def cancel(running: LocalFederation, folder: Path) -> dict[str, Any]:
    """A hospital joins by a bundle. Its first job for a round is cancelled, and it leaves while the next one waits."""
    tar, out = folder / "clinic.tar", folder / "cancelled"
    where = ["--federation", str(folder / "federation.yaml")]
    say(*SILOFL, "add-silo", "clinic", *where, "--out", str(tar))
    (folder / "policy.toml").write_text('studies = "optional"\n')
    data = str(running.silos[1].data)
    join = [*SILOFL, "join", str(tar), "--data", data, "--policy", str(folder / "policy.toml")]
    refused = subprocess.run([*join, "--slurm", "nosuch"], capture_output=True, text=True)
    silo = subprocess.Popen([*join, "--slurm", "low"], stdout=sys.stderr)
    wait_for(lambda: (site_root() / "clinic/online").exists(), 180)
    follower = start_run({**SLOW, "local-epochs": 5, "silos": 4, "lost-silo": "go-on"}, out)
    wait_for(lambda: ours() == "RUNNING", 180)
    hog = submit_job("low", 600)
    wait_for(lambda: ours() == "PENDING", 180)
    say("scancel", ours("JobID"))
    wait_for(lambda: "was cancelled" in text_of(out / "progress.jsonl"), 180)
    wait_for(lambda: ours() == "PENDING", 180)
    silo.terminate()
    silo.wait(60)
    left = ours()
    say("scancel", hog)
    follower.join()
    return {
        "refused": [refused.returncode, refused.stderr],
        "cancelled": text_of(out / "progress.jsonl"),
        "left": left,
    }


def faults(folder: Path) -> None:
    """Why a message has no answer, by what went wrong."""
    silo = NodeSilo(folder, folder / "none", pytest.MonkeyPatch())
    app, jobs = silo.app("1"), folder / "flower/jobs"
    slurm.ASK_SECONDS, slurm.SETTLE_SECONDS = 0.5, 2.0
    told: dict[str, str] = {}

    def ask(name: str, options: str = "low", behaviour: str = "", ttl: float = 60.0) -> None:
        silo.workers = SlurmJobs(options)
        silo.ask(app, behaviour, ttl)
        told[name] = silo.reason()
        silo.replies.clear()

    def cancel() -> None:
        wait_for(lambda: (folder / "marks/pid").exists(), 180)
        say("scancel", ours("JobID"))

    jobs.mkdir(parents=True)
    (jobs / "silofl-old").mkdir()
    old = submit_job("low", 600, "--job-name=silofl-old")
    threading.Thread(target=cancel).start()
    ask("scancel", behaviour="hangs")
    told["old"] = say("squeue", "--noheader", "--states=all", f"--job={old}", "--format=%T")
    ask("exit", behaviour="leaves")
    ask("late", behaviour="hangs", ttl=8.0)
    told["left"] = " ".join([*os.listdir(jobs), ours()])
    ask("partition", "nosuch")
    told["check"] = slurm_check("nosuch").detail
    told["good"] = slurm_check("low --gres=gpu:1").detail
    # A page for the question, one for the log, and none for the answer; then none at all
    say("mount", "-t", "tmpfs", "-o", "size=8k", "none", str(jobs))
    ask("disk of the job")
    (jobs / "full").write_bytes(bytes(8192))
    ask("disk")
    say("umount", str(jobs))
    # From here this process alone sees the folder
    assert ctypes.CDLL(None).unshare(0x00020000) == 0
    say("mount", "-t", "tmpfs", "none", str(jobs))
    ask("not shared")
    silo.workers.end()
    print(json.dumps(told))
