"""The site's half of `silofl doctor`: checks that this silo can train here and reach its server, each with a fix."""

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Protocol

from client.link.connection import connection_checks
from client.protocol.node import FIRST_GPU, Site, gpu_environment, on_cpu
from client.protocol.policy import read_policy
from client.site.runtime.slurm import refusal_of
from client.site.study.approvals import REQUIRED, list_approved
from client.site.trust.code import read_pins
from partitions.common.names import escape
from partitions.schema import load_schema
from partitions.silo_file import Check, check_silo_file


class Via(Protocol):
    """A link to the server through proxies (`client.link.local_end`)."""

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables with which gRPC takes the link."""

    def check(self) -> Check:
        """Check that the link carries this silo to its server."""


def site_checks(site: Site, link: Via | None = None, slurm: str = "") -> list[Check]:
    """Run all checks of a site, in the best order for fixing them; the last ones over the link, if it has one.

    ``slurm``: options of sbatch, if the app runs in jobs; a device is theirs then.
    """
    checks = [link.check()] if link else []
    checks += [
        version_check(site),
        *data_checks(site.data, site.schema),
        *state_checks(site.state),
        slurm_check(slurm) if slurm else device_check(site),
    ]
    checks += pin_checks(site.allowed_apps)
    checks.append(policy_check(site.policy))
    checks += study_checks(site)
    way = link.environment if link else {}
    checks += connection_checks(site, {**os.environ, **way}, sizes=True)
    return checks


def table(checks: Iterable[Check]) -> str:
    """Return the checks as lines: `ok` or `FAIL`, name, detail; under a failure its fix."""
    lines = []
    for check in checks:
        mark = "ok  " if check.ok else "FAIL"
        lines.append(f"{mark}  {check.name}: {_one_line(check.detail)}")
        if not check.ok:
            lines.append(f"      fix: {check.fix}")
    return "\n".join(lines)


def first_failure(checks: Iterable[Check]) -> Check | None:
    """Return the first check that failed; None if there is none."""
    return next((check for check in checks if not check.ok), None)


def as_json(checks: Iterable[Check]) -> str:
    """Return the checks as a JSON list of `{check, ok, detail, fix}`."""
    listed = [
        {"check": check.name, "ok": check.ok, "detail": check.detail, "fix": check.fix}
        for check in checks
    ]
    return json.dumps(listed, indent=2)


def one_line(check: Check) -> str:
    """Return a failure and its fix in one line."""
    return f"{check.name}: {_one_line(check.detail)}; {check.fix}"


def _one_line(detail: str) -> str:
    """Return a detail, which may have a server's words, in one line of printable characters."""
    return escape(" ".join(detail.split()))


# --- this machine -----------------------------------------------------------------------------------------


def version_check(site: Site) -> Check:
    """Compare Flower's version here and at the server: another minor version has another protocol."""
    here = metadata.version("flwr")
    if not site.flwr:
        return Check("versions", True, f"flwr {here}; the server's is not known")
    same = here.split(".")[:2] == site.flwr.split(".")[:2]
    fix = "" if same else f"install flwr {site.flwr}, or take the image of the server's version"
    return Check("versions", same, f"flwr {here} here, {site.flwr} at the server", fix)


def data_checks(path: Path, schema: Path | None = None) -> list[Check]:
    """Check the silo's data file as `silofl check-data` does, and its schema against the file `schema`, if any.

    An empty mount has a check of its own.
    """
    if path.is_dir():
        fix = "name the .npz file itself; in a container SILOFL_DATA names a file of the host"
        return [Check("data", False, f"{path} is a folder, no file", fix)]
    if not path.exists() and path.parent.is_dir() and not any(path.parent.iterdir()):
        fix = "mount the folder or volume that holds the data file"
        return [Check("data", False, f"{path.parent} is empty", fix)]
    if path.exists() and not os.access(path, os.R_OK):
        fix = f"chmod o+r, or run the silo as a user who may read it (in a container SILOFL_USER={_owner(path)})"
        return [Check("data", False, f"{path} cannot be read by user {os.geteuid()}", fix)]
    try:
        agreed = load_schema(schema) if schema and schema.exists() else None
    except ValueError as error:
        return [Check("schema", False, str(error), "restore the file from the bundle")]
    checks = check_silo_file(path, agreed=agreed)
    bad = [check for check in checks if not check.ok]
    if bad:
        return [Check(f"data ({bad[0].name})", False, f"{path}: {bad[0].detail}", bad[0].fix)]
    samples = next((check.detail for check in checks if check.name == "samples"), "")
    return [
        Check("data", True, f"{path}: {samples}"),
        *(check for check in checks if "schema" in check.name),
    ]


def _owner(path: Path) -> str:
    stat = path.stat()
    return f"{stat.st_uid}:{stat.st_gid}"


def state_checks(path: Path) -> list[Check]:
    """Check that models and state can be written."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b"x")
            os.fsync(file.fileno())
    except OSError as error:
        fix = f"let user {os.geteuid()} write there"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            fix = "make room on that disk"
        return [Check("state directory", False, f"{path}: {error.strerror}", fix)]
    return [Check("state directory", True, f"{path} can be written")]


KERNEL = """
import sys, torch
for device in map(torch.device, sys.argv[1].split(",")):
    x = torch.ones(64, 64, device=device)
    assert float((x @ x).sum()) == 64**3, "a product of matrices is wrong"
    print(torch.cuda.get_device_name(device) if device.type == "cuda" else "this machine's CPU")
"""


def device_check(site: Site) -> Check:
    """Check that PyTorch computes on the silo's GPU: a product of matrices, in a process of its own."""
    device, inside = site.device, site.node_config["device"]
    if on_cpu(device):
        return Check("device", True, device)
    done = subprocess.run(
        [sys.executable, "-c", KERNEL, inside],
        env={**os.environ, **gpu_environment(device)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return Check(
            "device", True, f"{device}: {', '.join(done.stdout.splitlines())} computes"
        )
    import torch

    count = torch.cuda.device_count()
    here = {FIRST_GPU, *(f"cuda:{i}" for i in range(count))}
    if count and here.issuperset(inside.split(",")):
        said = (done.stderr.strip().splitlines() or ["its process ended"])[-1]
        fix = "nvidia-smi -L lists the GPUs, and MIG devices by their names"
        return Check("device", False, f"{device}: {said}", f"{fix}; or set the device to cpu")
    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        detail = "this PyTorch is built for CPUs"
        fix = "use the GPU image (build argument TORCH_INDEX=)"
    else:
        detail = f"PyTorch sees {count} GPUs"
        fix = "nvidia-smi must list it; a container needs the NVIDIA container toolkit and a device reservation"
    return Check("device", False, f"{device}: {detail}", f"{fix}, or set the device to cpu")


def slurm_check(options: str) -> Check:
    """Check that Slurm would take a job with these options."""
    missing = [name for name in ("sbatch", "squeue", "scancel") if not shutil.which(name)]
    if missing:
        fix = "join from a machine that submits jobs; there may be a module to load"
        return Check("Slurm", False, f"there is no {', '.join(missing)} here", fix)
    try:
        said = refusal_of(options)
    except ValueError as error:
        said = f"{options!r}: {error}"
    fix = "" if not said else "mend --slurm, PARTITION or 'OPTIONS of sbatch'"
    return Check("Slurm", not said, said or f"takes jobs with {options}", fix)


def pin_checks(allowed_apps: str) -> list[Check]:
    """Report the apps that this site runs."""
    if not allowed_apps:
        return [
            Check(
                "allowed apps",
                True,
                "not pinned: this site runs whatever the server's operator submits",
            )
        ]
    try:
        count = len(set(read_pins(allowed_apps)))
    except OSError as error:
        fix = "restore the file from the bundle; until then every app is refused"
        return [Check("allowed apps", False, f"{error.filename}: {error.strerror}", fix)]
    return [Check("allowed apps", True, f"{count} pinned by SHA-256; all others are refused")]


def policy_check(where: str) -> Check:
    """Check the policy of this site."""
    try:
        policy = read_policy(where)
    except ValueError as error:
        detail, _, fix = str(error).partition("; ")
        return Check(
            "policy",
            False,
            detail,
            fix or "mend that line; until then nothing leaves this silo",
        )
    if policy.public:
        return Check("policy", True, "the data are public: nothing is held back")
    names = ("whole_model", "own_model", "peers", "sums", "min_metric_samples", "floor")
    rule_lines = ", ".join(map(policy.line, names))
    return Check(
        "policy",
        True,
        f"{policy.where}: {rule_lines}; `silofl policy{' FILE' if where else ''}` prints all",
    )


def study_checks(site: Site) -> list[Check]:
    """Report the approved studies if the site's policy requires one: without any, every run is refused."""
    try:
        if read_policy(site.policy).studies != REQUIRED:
            return []
        names = [
            approved.study.name
            for approved in list_approved(site.state)
            if not approved.revoked
        ]
    except ValueError as error:
        return [Check("studies", False, str(error), "until then no run is answered")]
    none = "none is approved, so no run is answered: silofl approve FILE"
    return [Check("studies", True, f"approved: {', '.join(names)}" if names else none)]
