"""Two nodes of Ray on 127.0.0.2 and 127.0.0.3, in namespaces of their own: python two_nodes.py FOLDER.

`inside` starts it in them: when its first process ends, the kernel ends all others there, Ray's too. It runs a study by
`silofl simulate --workers ray` and a run by `flwr run`, and prints which nodes worked on each.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = "127.0.0.2:6379"
STUDY: dict[str, Any] = {
    "dataset": "digits", "partition": "dirichlet", "silos": 3, "rounds": 2, "threads": 2, "model": "mlp",
    "strategy": "fedavg,fedprox",
}  # fmt: skip
RUN: dict[str, Any] = {**STUDY, "strategy": "fedavg"}


def inside(folder: Path) -> list[list[str]]:
    """Return the nodes that worked on the study, and on Flower's run; their directories are in the folder."""
    command = [
        "unshare",
        "-n",
        "-p",
        "-f",
        "--mount-proc",
        sys.executable,
        __file__,
        str(folder),
    ]
    path = f"{ROOT}:{ROOT / 'tests/helpers'}"
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, cwd=folder, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    nodes: list[list[str]] = json.loads(done.stdout.splitlines()[-1])
    return nodes


def start(*options: str) -> None:
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", *options, "--num-cpus=2"]
    small = ["--disable-usage-stats", "--object-store-memory=100000000"]
    subprocess.run([*command, *small], check=True, stdout=sys.stderr)


def worked(task: str) -> list[str]:
    """Return the nodes on which tasks of this name ran."""
    code = "import ray, json; ray.init(logging_level=40, log_to_driver=False); print(json.dumps(ray.timeline()))"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    events = json.loads(done.stdout.splitlines()[-1])
    print(sorted({(e["cat"], e["pid"]) for e in events}), file=sys.stderr)
    return sorted({e["pid"] for e in events if e["cat"] == f"task::{task}"})


def main(folder: Path) -> None:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    with tempfile.TemporaryDirectory(
        prefix="ray", ignore_cleanup_errors=True
    ) as short:  # for its sockets
        head = ["--head", "--port=6379", "--include-dashboard=false", f"--temp-dir={short}"]
        start("--node-ip-address=127.0.0.2", *head)
        start("--node-ip-address=127.0.0.3", f"--address={ADDRESS}")
        os.environ |= {"RAY_ADDRESS": ADDRESS, "FLWR_HOME": str(folder / "flwr-home")}
        os.environ["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] = "1"
        os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        settings = [f"--set={key}={value}" for key, value in STUDY.items()]
        command = [
            sys.executable,
            "-m",
            "server.cli.main",
            "simulate",
            "--workers",
            "ray",
            *settings,
        ]
        subprocess.run(
            [*command, "--out", str(folder / "study")], check=True, stdout=sys.stderr
        )
        study = worked("work_on_ray")
        from ray_runs import local_superlink, run_under_ray

        with local_superlink() as ports:
            run_under_ray(RUN, folder / "flower", ports)
        print(json.dumps([study, worked("ClientAppActor.run")]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
