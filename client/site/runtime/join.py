"""`silofl join`: run the silo of a bundle without Docker."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from client.site.node import Site, gpu_environment
from client.site.runtime.doctor import Via, first_failure, one_line, site_checks, table
from client.site.runtime.launch import (
    free_ports,
    own_supernode,
    silo_environment,
    supernode_command,
)
from client.site.runtime.slurm import OPTIONS
from client.site.runtime.supervisor import run
from client.site.trust.bundle import (
    POLICY_ASKED,
    check_key,
    check_signature,
    read_bundle,
    site_of,
    unpack,
)
from client.site.trust.keys import site_root
from partitions.common.errors import UserError
from partitions.common.files import hold_lock, write_atomically
from partitions.own.index import as_file


def join(
    bundle: Path,
    data: Path,
    *,
    device: str = "",
    policy: Path | None = None,
    signed_by: str = "",
    allow_older: bool = False,
    via: Callable[[Site], AbstractContextManager[Via]] | None = None,
    slurm: str = "",
    echo: Callable[[str], None],
) -> int:
    """Run the silo of a bundle in the foreground until SIGTERM or SIGINT, after checking everything.

    State, models and logs stay under `site_root()/NAME`. `signed_by` and `allow_older` are `by` and `allow_older` of
    `check_signed`. `via` makes the silo's link through proxies. `slurm`: options of sbatch, if the app runs in jobs.

    Raises UserError for a fault in the bundle, its signature, the data, the address, the certificate or the key, or if
    this silo already runs.
    """
    files = read_bundle(bundle)
    site = site_of(files, Path())
    check_key(files, site)
    name = site.name
    folder = site_root() / name
    with only_one(folder, name):
        check_signature(bundle, files, name, signed_by, echo=echo, allow_older=allow_older)
        unpack(files, folder)
        site = site_of(files, folder, as_file(data, folder, echo), device, policy)
        asked = str(site.policy if policy else "")
        with via(site) if via else nullcontext() as link:
            return _take_part(site, folder, link, asked, slurm, echo)


def _take_part(
    site: Site,
    folder: Path,
    link: Via | None,
    policy: str,
    slurm: str,
    echo: Callable[[str], None],
) -> int:
    """Check everything, then run the SuperNode."""
    checks = site_checks(site, link, slurm)
    echo(table(checks))
    if fault := first_failure(checks):
        raise UserError(f"{site.name} cannot join: {one_line(fault)}")
    # For `silofl policy`, `study`
    write_atomically(folder / POLICY_ASKED, policy)
    port = free_ports(1)[0]
    echo(f"{site.name} joins {site.server}; Ctrl-C leaves")
    echo(
        f"port {port} is open on 127.0.0.1 alone: Flower's SuperNode opens it, and nothing here uses it"
    )
    command = supernode_command(site, program=own_supernode(), port=port)
    environment = silo_environment(folder / "flower", template_socket=folder / "warm.sock")
    environment |= {"SILOFL_ALLOWED_APPS": site.allowed_apps, "SILOFL_POLICY": site.policy}
    environment |= {"SILOFL_SERVER": site.server}  # the sender in the audit log
    environment |= {**(link.environment if link else {}), **gpu_environment(site.device)}
    environment[OPTIONS] = slurm
    # A job has the cores that Slurm gives it, not this machine's
    if slurm and "OMP_NUM_THREADS" not in os.environ:
        del environment["OMP_NUM_THREADS"]
    return run(site, command, environment, online=folder / "online", echo=echo)


@contextmanager
def only_one(folder: Path, name: str) -> Iterator[None]:
    """Allow one `join` of a silo on this machine at a time."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with hold_lock(
        folder / "lock",
        f"{name} runs on this machine already: a bundle runs in one place at a time",
    ):
        yield
