"""A silo as one supervised process: its SuperNode, started again where that helps.

Used by the container of a silo and by `silofl join`. If the silo's key is unknown or in use by another SuperNode, or if
the certificate does not fit, the SuperNode ends with an error in Flower's terms, or retries forever. `run` retries
if waiting helps. Otherwise one line names the cause (`client.site.runtime.doctor` finds it). `join` is `silofl join`:
the silo of a bundle, without Docker.
"""

import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import FrameType
from typing import IO

from client.flower.fleet import BACK, LOST, REFUSED, REGISTERED
from client.link.connection import CLOCK, connection_checks
from client.link.route import TRANSIENT
from client.protocol.keys import site_root
from client.protocol.launch import die_with_parent, own_supernode, silo_environment
from client.protocol.node import Site, gpu_environment, supernode_command
from client.site.runtime.doctor import (
    Via,
    data_checks,
    first_failure,
    one_line,
    policy_check,
    site_checks,
    state_checks,
    table,
)
from client.site.runtime.slurm import OPTIONS
from client.site.trust.bundle import (
    POLICY_ASKED,
    check_node_key,
    read_bundle,
    site_of,
    unpack_bundle,
)
from client.site.trust.signing import check_signed
from partitions.common.errors import RunFailedError, UserError
from partitions.common.files import hold_lock, make_folder, write_atomically
from partitions.own.index import as_file
from partitions.silo_file import Check

WAIT_SECONDS = 5.0
# A SuperLink marks a dead silo offline 24 s after its last sign of life (three minutes in a long transfer), and refuses
# its key until then.
IN_USE_SECONDS = 195.0
RESTART_SECONDS = 60.0  # for a restarted server to register this silo again
EXPLAIN_SECONDS = 60.0  # between two checks for the cause of a missing connection
# A silo's last call has 2 s; Docker kills 10 s after its SIGTERM
GRACE_SECONDS = 7.0
IN_USE = (
    "its key is in use: a bundle runs in one place at a time, so end the other one or ask the server's operator for "
    "a second bundle (after a crash it takes up to three minutes until the server lets the silo in again)"
)


def check_site(site: Site) -> None:
    """Raise UserError, one line, if the silo cannot train: no usable data or policy, no place for its state."""
    if fault := first_failure(
        [*data_checks(site.data), *state_checks(site.state), policy_check(site.policy)]
    ):
        raise UserError(f"{site.name}: {one_line(fault)}")


def run(
    site: Site,
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    online: Path,
    echo: Callable[[str], None],
) -> int:
    """Run the silo until SIGTERM or SIGINT; exit code 0.

    `online` is a file that exists while the SuperLink has this silo registered and connected.

    Raises UserError if the data, the key, the certificate or the address are wrong; its text has the cause and the fix.
    Raises RunFailedError if the SuperNode ended for another reason.
    Raises KeyboardInterrupt after SIGINT, when everything has ended.
    """
    check_site(site)
    online.unlink(missing_ok=True)
    silo = Supervised(site, command, environment, online, echo)
    since: float | None = None  # when the current failure began
    try:
        while True:
            silo.follow()
            online.unlink(missing_ok=True)
            if silo.stopped == signal.SIGINT:
                raise KeyboardInterrupt
            if silo.stopped:
                return 0
            if since is None or silo.was_online:
                since, reported = time.monotonic(), ""
            trouble, patience, error = diagnose(silo)
            if time.monotonic() - since >= patience:
                raise error(f"{site.name}: {trouble}")
            if trouble != reported:
                echo(f"{site.name}: {trouble}; trying again")
                reported = trouble
            silo.pause(WAIT_SECONDS)
    finally:
        online.unlink(missing_ok=True)


def diagnose(silo: "Supervised") -> tuple[str, float, type[Exception]]:
    """Return why the SuperNode ended, for how many seconds to try again, and the error to raise after that."""
    # A silo that was online may have to wait for a restarted server, until its key is registered again.
    patience = RESTART_SECONDS if silo.ever_online else 0.0
    if fault := fault_in_connection(silo):
        waits = silo.ever_online and fault.name == CLOCK
        return one_line(fault), math.inf if waits else patience, UserError
    if silo.in_use:
        return IN_USE, IN_USE_SECONDS, UserError
    return (
        f"the SuperNode ended with exit code {silo.code}: {silo.last_line}",
        patience,
        RunFailedError,
    )


def fault_in_connection(silo: "Supervised") -> Check | None:
    """Return the first failed check of the connection of a SuperNode with its environment; None if all are good."""
    return first_failure(connection_checks(silo.site, silo.environment))


class Supervised:
    """The SuperNode of one silo. Signals to this process are passed on to it."""

    def __init__(
        self,
        site: Site,
        command: Sequence[str],
        environment: Mapping[str, str],
        online: Path,
        echo: Callable[[str], None],
    ) -> None:
        self.site, self.command, self.environment = site, command, dict(environment)
        self.online, self.echo, self.explained = online, echo, -EXPLAIN_SECONDS
        self.process: subprocess.Popen[str] | None = None
        self.stopped: signal.Signals | None = None
        self.was_online = self.ever_online = self.in_use = False
        self.code, self.last_line = 0, ""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)

    def follow(self) -> None:
        """Start the SuperNode, forward its output, and return when it has ended."""
        self.was_online = self.in_use = False
        if self.stopped:
            return
        self.process = subprocess.Popen(
            self.command,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C reaches it only through this process
            preexec_fn=die_with_parent,
        )
        assert self.process.stdout is not None
        end = threading.Thread(target=end_group, args=(self.process,))
        end.start()
        self._read(self.process.stdout)
        end.join()
        self.code = self.process.wait()
        self.process = None

    def _read(self, output: IO[str]) -> None:
        for line in output:
            sys.stdout.write(line)
            sys.stdout.flush()
            if REGISTERED in line:
                self.was_online = self.ever_online = True
                self.online.touch()
            elif LOST in line:
                self.online.unlink(missing_ok=True)
                self._explain()
            elif BACK in line and self.was_online:
                self.online.touch()
            elif REFUSED in line:
                self.in_use = True
            if line.strip():
                self.last_line = line.strip()

    def _explain(self) -> None:
        """Report why there is no connection, since a SuperNode retries forever; end it if a retry cannot help."""
        if time.monotonic() - self.explained < EXPLAIN_SECONDS:
            return
        self.explained = time.monotonic()
        fault = fault_in_connection(self)
        if fault and fault.name not in TRANSIENT and not self.ever_online and self.process:
            self.process.terminate()  # `diagnose` finds the same fault, and ends the silo with it
        elif fault:
            self.echo(f"{self.site.name}: no connection: {one_line(fault)}")

    def pause(self, seconds: float) -> None:
        """Wait for `seconds`, or until a signal."""
        deadline = time.monotonic() + seconds
        while not self.stopped and time.monotonic() < deadline:
            time.sleep(0.1)

    def _stop(self, number: int, _: FrameType | None) -> None:
        self.stopped = signal.Signals(number)
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            signal.signal(signal.SIGALRM, self._kill)
            signal.setitimer(signal.ITIMER_REAL, GRACE_SECONDS)

    def _kill(self, number: int, _: FrameType | None) -> None:
        if self.process is not None:
            self.process.kill()


def end_group(process: subprocess.Popen[str]) -> None:
    """Wait for a SuperNode's end, then end its children.

    They would live as long as the SuperNode's process number exists, that is, until it is waited for. They would also
    keep the output open, which is read to its end.
    """
    process.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


# --- silofl join ---


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
    check_node_key(files, site)
    name = site.name
    folder = site_root() / name
    with only_one(folder, name):
        unpacked = bundle.is_dir()
        check_signed(
            files, folder, signed_by, unpacked=unpacked, echo=echo, allow_older=allow_older
        )
        unpack_bundle(files, folder)
        site = site_of(files, folder, as_file(data, folder, echo), device, policy)
        named = str(site.policy if policy else "")
        with via(site) if via else nullcontext() as link:
            return _take_part(site, folder, link, named, slurm, echo)


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
    echo(f"{site.name} joins {site.server}; Ctrl-C leaves")
    command = supernode_command(site, program=own_supernode())
    environment = silo_environment(folder / "flower", template_socket=folder / "warm.sock")
    environment |= {"SILOFL_ALLOWED_APPS": site.allowed_apps, "SILOFL_POLICY": site.policy}
    environment |= {"SILOFL_SERVER": site.server}  # the sender in the audit log
    environment |= {**(link.environment if link else {}), **gpu_environment(site.device)}
    environment[OPTIONS] = slurm
    # A job has the cores that Slurm gives it, not this machine's
    if slurm and "OMP_NUM_THREADS" not in os.environ:
        del environment["OMP_NUM_THREADS"]
    return run(site, command, environment, online=folder / "online", echo=echo)


@contextlib.contextmanager
def only_one(folder: Path, name: str) -> Iterator[None]:
    """Allow one `join` of a silo on this machine at a time."""
    make_folder(folder, 0o700)
    busy = f"{name} runs on this machine already: a bundle runs in one place at a time"
    with hold_lock(folder / "lock", busy):
        yield
