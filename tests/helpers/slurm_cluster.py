"""A Slurm of two nodes with a GPU each, on this machine, in namespaces: python slurm_cluster.py SCENARIO FOLDER.

`inside` starts it there: when its first process ends, the kernel ends all others, Slurm's too. A GPU is /dev/null, and
every job runs in `unshare -n`. The partition `high` preempts jobs of `low`, on the first node; `both` has two.
"""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from debian import libraries, unpacked

ROOT = Path(__file__).resolve().parents[2]
ADDRESS, NODE, SECOND = "192.0.2.5", "node1", "node2"
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={node}({address})
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
SlurmUser=root
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
StateSaveLocation={folder}
SlurmdSpoolDir=/mnt/%n
PluginDir={plugins}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SchedulerParameters=sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=2
MailProg=/bin/true
GresTypes=gpu
NodeName={node} NodeAddr={address} CPUs=1 Gres=gpu:1
NodeName={second} NodeHostname={node} NodeAddr={address} Port=16818 CPUs=1 Gres=gpu:1
PartitionName=low Nodes={node} PriorityTier=1
PartitionName=high Nodes={node} PriorityTier=9
PartitionName=both Nodes={node},{second}
"""
# The job's process has no network, not even a loopback interface that is up; MARKS is for the app of `supernode.py`
SBATCH = """\
#!/bin/sh
export MARKS={folder}/../marks
exec sed 's|^exec |exec {folder}/alone |' | {sbatch} "$@"
"""
ALONE = """\
#!/bin/sh
exec unshare -n sh -c 'ip -brief link; exec "$@"' job "$@"
"""


def inside(scenario: str, folder: Path) -> str:
    """Return what a function of `slurm_scenarios` printed there."""
    unpacked()
    if not (shutil.which("unshare") and shutil.which("ip")):
        pytest.skip("needs unshare and ip")
    command = [
        "unshare",
        "-n",
        "-u",
        "-m",
        "-p",
        "-f",
        "--kill-child",
        "--mount-proc",
        sys.executable,
    ]
    path = f"{ROOT}:{ROOT / 'tests/helpers'}"
    done = subprocess.run(
        [*command, __file__, scenario, str(folder)],
        env={**os.environ, "PYTHONPATH": path},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=1170,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    return done.stdout


def start(folder: Path) -> None:
    """Start the cluster, and put its commands on this process's PATH."""
    root = unpacked()
    variables = libraries(root)
    library = Path(variables["LD_LIBRARY_PATH"])
    for words in (["link", "set", "lo", "up"], ["address", "add", ADDRESS, "dev", "lo"]):
        subprocess.run(["ip", *words], check=True)
    subprocess.run(["hostname", NODE], check=True)
    folder.mkdir()
    (folder / "key").write_bytes(os.urandom(1024))
    (folder / "key").chmod(0o600)
    text = CONFIGURATION.format(
        folder=folder, plugins=library / "slurm-wlm", node=NODE, second=SECOND, address=ADDRESS
    )
    (folder / "slurm.conf").write_text(text)
    # Sockets lie there, whose paths have 108 bytes at most
    subprocess.run(["mount", "-t", "tmpfs", "none", "/mnt"], check=True)
    (folder / "gres.conf").write_text("Name=gpu File=/dev/null\n")
    sbatch = SBATCH.format(folder=folder, sbatch=root / "usr/bin/sbatch")
    for name, script in (("sbatch", sbatch), ("alone", ALONE)):
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)
    variables["LD_LIBRARY_PATH"] = f"{library}:{library / 'slurm-wlm'}"
    os.environ |= {**variables, "SLURM_CONF": str(folder / "slurm.conf")}
    os.environ["PATH"] = f"{folder}:{root}/usr/bin:{os.environ['PATH']}"
    named = ("key-file", "socket", "pid-file", "log-file", "seed-file")
    munge = [f"--{name}={folder}/munge.{name[:4]}" for name in named]
    munge[0], munge[1] = f"--key-file={folder}/key", f"--socket={folder}/munge.sock"
    step = str(root / "usr/sbin/slurmstepd-wlm")
    daemons = [
        ("munged", "munged", ["--force", *munge]),
        # Under another name it does not take its nodes' GPUs
        ("slurmctld", "slurmctld-wlm", []),
        *(("slurmd", "slurmd-wlm", ["-N", name, "-d", step]) for name in (NODE, SECOND)),
    ]
    for name, file, options in daemons:
        program = root / "usr/sbin" / file
        subprocess.run([name, *options], executable=program, check=True, stdout=sys.stderr)


if __name__ == "__main__":
    start(Path(sys.argv[2]) / "slurm")
    getattr(importlib.import_module("slurm_scenarios"), sys.argv[1])(Path(sys.argv[2]))
