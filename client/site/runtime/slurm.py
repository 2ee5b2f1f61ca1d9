"""The app's process as a Slurm job, in place of `worker.py`: one job answers one message, by files in a shared folder.

    SuperNode, on a login node  --jobs/silofl-NONCE/question-->  job, on a compute node without a network
                                <--jobs/silofl-NONCE/answer----

Each message has a folder of its own, whose name is drawn at random and is the job's name too. So no answer of an
earlier job is taken, and what a dead SuperNode left can be cancelled. A job that Slurm requeues finds the same question
and repeats its work. Its answer appears whole, by a rename, and passes the gate as any app's.

A training on several devices has a process for each of them: on the job's one node, where they are connected over
loopback, or on its several nodes by `srun`, over the cluster's network. They meet by a file in the shared folder.

The job gets the variables in `PASSED` only: no proxy's password, no key's path. Run as `site.runtime.slurm FOLDER
PROCESSES` by `private.py`, this module is the job.
"""

import contextlib
import errno
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...flower.fleet import announce_queue
from ...protocol.launch import (
    BY_SITE,
    BY_SITE_VALUE,
    GROUP,
    LOOPBACK_ONLY,
    die_with_parent,
    flower_home,
    site_process,
)
from ...protocol.node import devices_in
from .app_process import (
    DIED,
    answer_question,
    prepare_process,
    read_answer,
    write_question,
    wrote_error,
)
from .worker import TOO_LATE, WorkerEndedError, Workers, how_it_ended, shared_memory

OPTIONS = "SILOFL_SLURM"  # in a SuperNode's environment: options of sbatch; none: no Slurm
PASSED = (
    *("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "PYTHONPATH"),
    *("TZ", "USER", "SLURM_CONF", "FLWR_HOME", "OMP_NUM_THREADS"),
    *("SILOFL_WEIGHTS", "SILOFL_GPU_SHARE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"),
)
PREFIX = "silofl-"
LOOK_SECONDS, ASK_SECONDS = 0.5, 5.0  # between two looks for the answer, two questions to Slurm
SETTLE_SECONDS = 60.0  # until another node's file is seen here, at most, by NFS
WAITING = ("PENDING", "CONFIGURING", "SUSPENDED", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")
RUNNING = ("RUNNING", "COMPLETING", "SIGNALING", "STAGE_OUT", "STOPPED")
ENDED = {
    "CANCELLED": "was cancelled (scancel)",
    "TIMEOUT": "reached its time limit: the site asks for more by --time",
    "OUT_OF_MEMORY": "ran out of memory: lower batch-size, or the site asks for more by --mem",
    "PREEMPTED": "was preempted, and its partition requeues no job",
    "NODE_FAIL": "lost its node",
    "COMPLETED": "wrote no answer that its login node sees: is the state folder on a shared disk?",
}
FULL = (errno.ENOSPC, errno.EDQUOT)


def sbatch_words(text: str) -> list[str]:
    """Return the site's options of sbatch; a word alone is a partition. Raises ValueError for an open quote."""
    words = shlex.split(text) or [""]
    return words if words[0].startswith("-") else [f"--partition={words[0]}", *words[1:]]


def job_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that sbatch and the job get, of a SuperNode's."""
    return {k: v for k, v in variables.items() if k in PASSED or k.startswith("SBATCH_")}


class SlurmJobs(Workers):
    """A job for each message."""

    def __init__(self, options: str) -> None:
        super().__init__()
        self.options = sbatch_words(options)
        self.folder: Path = flower_home() / "jobs"
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for left in self.folder.glob(f"{PREFIX}*"):
            remove(left)

    def tidy(self) -> None:
        """Do nothing: no process waits for a message."""

    def ask(self, head: dict[str, Any], message: Any, context: Any) -> Any:
        """Return the app's reply as `Workers.ask` does, from a job."""
        ends = time.monotonic() + message.metadata.ttl
        devices = devices_in(context.node_config)
        count = len(devices) if message.metadata.message_type == "train" else 1
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=self.folder))
        try:
            with open(folder / "question", "xb") as question:
                write_question(question, head, message, context)
            self._wait(self._submit(folder, count), folder / "answer", ends)
            with (
                open(folder / "answer", "rb", opener=open_plain) as answer,
                shared_memory() as copy,
            ):
                # A job could still write to its file
                shutil.copyfileobj(answer, copy)
                copy.flush()
                return read_answer(copy, message, context)
        except OSError as error:
            if error.errno in FULL:
                raise WorkerEndedError("the disk of its state folder is full") from error
            raise
        finally:
            announce_queue(False)
            show_log(folder / "log")
            remove(folder)

    def _submit(self, folder: Path, count: int) -> str:
        """Submit the job for a question, of this many processes, and return its number."""
        command = site_process("site.runtime.slurm", str(folder), str(count))
        # `%` begins a pattern there
        log = str(folder / "log").replace("%", "%%")
        ours = ["--parsable", "--requeue", "--open-mode=append", "--export=ALL"]
        ours += [f"--job-name={folder.name}", f"--output={log}", f"--chdir={os.getcwd()}"]
        done = slurm(
            *("sbatch", *self.options, *ours), script=f"#!/bin/sh\nexec {shlex.join(command)}\n"
        )
        if done.returncode:
            raise WorkerEndedError(f"Slurm took no job: {last_line(done.stderr)}")
        return done.stdout.strip().partition(";")[0]

    def _wait(self, job: str, answer: Path, ends: float) -> None:
        """Wait for an answer. Raises WorkerEndedError if the job ends without one, or too late."""
        printed = ""
        while not look_for(answer, min(time.monotonic() + ASK_SECONDS, ends)):
            if time.monotonic() >= ends:
                raise WorkerEndedError(TOO_LATE)
            state, reason, code = job_state(job)
            # Slurm does not answer
            if not state:
                continue
            if state not in (*WAITING, *RUNNING):
                patient = SETTLE_SECONDS if state == "COMPLETED" else LOOK_SECONDS
                if look_for(answer, min(time.monotonic() + patient, ends)):
                    return
                raise WorkerEndedError(f"Slurm job {job} {why_no_answer(state, code, answer)}")
            announce_queue(state in WAITING)
            line = f"queued ({reason})" if state in WAITING else state.lower()
            if line != printed:
                print(f"Slurm job {job}: {line}", flush=True)
                printed = line


def slurm(*command: str, script: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command of Slurm, with the variables that jobs get."""
    return subprocess.run(
        command,
        input=script,
        env=job_environment(os.environ),
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )


def refusal_of(options: str) -> str:
    """Return why Slurm would take no job with a site's options; empty: it would. Raises ValueError."""
    done = slurm("sbatch", *sbatch_words(options), "--test-only", script="#!/bin/sh\n")
    return last_line(done.stderr) if done.returncode else ""


def job_state(job: str) -> tuple[str, str, str]:
    """Return a job's state, why it waits, and its exit code; nothing where Slurm does not answer."""
    fields = "State:|,Reason:|,exit_code:|"
    done = slurm("squeue", "--noheader", "--states=all", f"--job={job}", f"--Format={fields}")
    if "Invalid job id" in done.stderr:
        return "FORGOTTEN", "", ""
    words = [*map(str.strip, done.stdout.split("|")), "", "", ""]
    return words[0], words[1], words[2]


def why_no_answer(state: str, code: str, answer: Path) -> str:
    """Return in words why a job has no answer. ``code``: its status as `wait` returns it."""
    number = int(code) if code.isdigit() else 0
    status = -(number & 127) or number >> 8
    if status in FULL:
        return "found the disk of its state folder full"
    if state in ENDED:
        return ENDED[state]
    if not is_there(answer.with_name("log")):
        return "never began: its node must see the state folder and silofl's Python"
    return f"is {state}: {how_it_ended(DIED + str(status).encode())}"


def is_there(file: Path) -> bool:
    """Return whether a file is there; its folder is read anew, since NFS remembers what was not there."""
    return file.name in os.listdir(file.parent)


def look_for(answer: Path, until: float) -> bool:
    """Return whether an answer appears until a time."""
    while not (there := is_there(answer)) and time.monotonic() < until:
        time.sleep(LOOK_SECONDS)
    return there


def open_plain(path: str, flags: int) -> int:
    """Open a file of a job's: no link is followed, and no pipe waited for."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def show_log(log: Path) -> None:
    """Print what a job printed."""
    with contextlib.suppress(OSError), open(log, "rb", opener=open_plain) as file:
        shutil.copyfileobj(file, sys.stdout.buffer)
        sys.stdout.flush()


def remove(folder: Path) -> None:
    """Cancel a job that may still be there, and remove its folder."""
    if not (folder / "answer").exists():
        slurm("scancel", "--quiet", f"--jobname={folder.name}")
    shutil.rmtree(folder, ignore_errors=True)


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it said nothing"])[-1]


# --- in the job -------------------------------------------------------------------------------------------


def main() -> None:
    """Answer the question in a folder, or start the processes that do, which have a third argument: where they meet."""
    _, place, count, *meeting = sys.argv
    folder = Path(place)
    os.umask(0o077)
    if int(count) > 1 and not meeting:
        code = run_processes(folder, int(count))
        if number := max(-code, code - 128, 0):
            os.kill(os.getpid(), number)
        sys.exit(code)
    rank = os.environ["SLURM_PROCID"]
    os.environ |= {BY_SITE: BY_SITE_VALUE, GROUP: f"{rank} {''.join(meeting)}"}
    os.environ.setdefault("OMP_NUM_THREADS", os.environ.get("SLURM_CPUS_ON_NODE", "1"))
    sys.argv = ["flwr-clientapp"]
    prepare_process()
    new = folder / f"answer.new{rank}"
    try:
        with open(folder / "question", "rb") as source, open(new, "w+b") as answered:
            answer_question(None, source, answered)
            os.fsync(answered.fileno())
            failed = wrote_error(answered)
        # The first process cannot end without one that fails, whose answer is then the job's
        if (failed or rank == "0") and not is_there(folder / "answer"):
            new.rename(folder / "answer")
    except OSError as error:
        print(f"ERROR: {error}", file=sys.stderr)
        sys.exit(error.errno or 1)
    sys.exit(int(failed and int(count) > 1))


def run_processes(folder: Path, count: int) -> int:
    """Run a job's processes to their end, or until one fails; return its exit code, or minus its signal.

    On several nodes gloo listens where a node's name leads, or at the site's ``GLOO_SOCKET_IFNAME``.
    """
    # A requeued job finds what its first attempt left
    meeting = tempfile.mkdtemp(dir=folder)
    command = site_process("site.runtime.slurm", str(folder), str(count), meeting)
    nodes = int(os.environ["SLURM_NNODES"])
    of_node = -(-count // nodes)
    cores = int(os.environ.get("SLURM_CPUS_ON_NODE", "1"))
    variables = {"OMP_NUM_THREADS": str(max(1, cores // of_node)), **os.environ}
    if nodes > 1:
        step = ["srun", f"--ntasks={count}", f"--ntasks-per-node={of_node}", "--overcommit"]
        step += ["--cpu-bind=none", "--kill-on-bad-exit=1"]
        return subprocess.run([*step, *command], env=variables, check=False).returncode
    variables |= LOOPBACK_ONLY
    processes = [
        subprocess.Popen(
            command, env={**variables, "SLURM_PROCID": str(rank)}, preexec_fn=die_with_parent
        )
        for rank in range(count)
    ]
    codes = (os.waitstatus_to_exitcode(os.wait()[1]) for _ in processes)
    # The others end with this process
    return next(filter(None, codes), 0)


if __name__ == "__main__":
    main()
