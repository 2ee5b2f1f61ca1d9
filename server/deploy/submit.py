"""`silofl run` and `silofl stop`: submit as `flwr run` does, follow the run to its end, say why it failed.

A study (several methods or seeds) is one Flower run after the other, of the app as it was when the study began, all in
one run directory. The server app appends a JSON line per round to `progress.jsonl` there; how a run ends is asked from
the SuperLink, so that a run that dies before its first round, or with its server app, is noticed too.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from client.site.trust.apps import build
from partitions.common.errors import RunFailedError, UserError
from partitions.common.files import shared, write_atomically
from server.deploy.containers import find_deployed
from server.deploy.control import Control, read_connection
from server.deploy.federation import read_federation
from server.deploy.local.parts import last_lines
from server.deploy.local.record import find_local, state_root

if TYPE_CHECKING:
    from server.results.run_directory import RunDirectory
    from strategies.base.settings import Common, Value

POLL_SECONDS = 0.5
SILENCE_SECONDS = 30.0  # how long the SuperLink may give no answer before the run is taken for lost
STOP_SECONDS = 60.0


def default_connection() -> str:
    """The connection of the one federation that is up: that `silofl up` or `silofl credentials` wrote."""
    try:
        return find_local().connection.name
    except ValueError:
        if deployed := find_deployed():
            return deployed.connection.name
        raise


def run(
    values: Mapping[str, object],
    connection: str = "",
    app: Path | None = None,
    fill: Callable[[Path], object] = lambda directory: None,
) -> Path:
    """Run one method, or a study, on a federation; returns the run directory.

    ``values``: settings as on the command line; `silos`, if not given: those online, and late joiners.
    ``connection``: name of a `flwr` connection; by default the one that `silofl up` wrote.
    ``app``: directory of the Flower app; by default the one this file belongs to. ``fill`` may put files into the run
    directory before the run is submitted.

    Raises UserError: a wrong setting, no such connection, data that are not the federation's.
    Raises RunFailedError: the run failed at submission, at a silo or at the server, or was stopped.
    Raises KeyboardInterrupt: after the run was stopped.
    """
    from server.results.run_directory import default_out
    from server.results.study import study_config, study_runs

    name = connection or default_connection()
    bundle = build(app or app_directory())
    with Control(read_connection(name)) as control:
        given = {**_own_data(name, values), **_of_the_file(name, values), **values}
        if "silos" not in given:
            given["silos"] = _silos_before(given) or _silos_online(control, str(given.get("late-joiners", "")))
        runs = study_runs(given)
        first = runs[0].common
        if not first.resume:
            _check_silos(first, {node.name for node in control.nodes()})
        config = study_config(runs)
        out = (Path(first.out) if first.out else default_out(str(config["strategy"]))).absolute()
        theirs = out
        if deployed := find_deployed(name):
            out = out if first.out else Path(deployed.runs, out.name)
            theirs = deployed.in_container(out)
        with shared() if deployed else contextlib.nullcontext():  # the server in its container is another user
            directory = open_directory(out, config, federation_file(name), resume=first.resume)
            fill(directory.path)
        for one in runs:
            settings = {**one.flat(), "out": str(theirs), "resume": first.resume}
            submit_and_follow(control, bundle, settings, directory.path)
    return directory.path


def open_directory(out: Path, config: Mapping[str, Value], federation: str, *, resume: bool) -> RunDirectory:
    """The run directory, in which the server app will find that it is open already."""
    from server.results.run_directory import RunDirectory

    with RunDirectory.open(out, config, resume=resume) as directory:
        write_atomically(directory.path / "study", federation)  # tells the report which federation this was
    return directory


def app_directory() -> Path:
    """The directory of silofl's own Flower app."""
    directory = Path(__file__).resolve().parents[2]
    if not (directory / "pyproject.toml").is_file():
        raise UserError(f"there is no pyproject.toml in {directory}: run silofl from a checkout, installed with pip -e")
    return directory


def _silos_before(given: Mapping[str, object]) -> int:
    """Return the number of silos of the run to be resumed; 0: none is. The server sees which of them are online."""
    from server.results.run_directory import read_toml

    config = Path(str(given.get("out") or "")) / "config.toml"
    resumed = str(given.get("resume", "")).lower() == "true" and bool(given.get("out")) and config.is_file()
    return cast(int, read_toml(config)["silos"]) if resumed else 0


def _silos_online(control: Control, late: str) -> int:
    """Count the silos that are online, and those that may join late.

    The run does not wait for a hospital that has not joined yet, or has left.
    """
    from strategies.base.newcomer.settings import ANY

    nodes = control.nodes()
    offline = {node.name for node in nodes if node.status != "online"}
    coming = offline if late == ANY else {entry.partition("=")[0].strip() for entry in late.split(",") if "=" in entry}
    if left := sorted(offline - coming):
        print(f"without {', '.join(left)}: not online (--set silos={len(nodes)} waits)", file=sys.stderr)
    online = {node.name for node in nodes} - offline
    return max(1, len(online | coming))


def _check_silos(common: Common, registered: Set[str]) -> None:
    """Raise UserError where the run would wait for silos that are not registered, or could take none that come."""
    from server.run.registration.late_joiners import LateJoiners
    from strategies.base.newcomer.settings import ANY

    if common.late_joiners == ANY and not common.min_silos:
        raise UserError(f"late-joiners = {ANY}: min-silos is wanted too, the number of silos that the run begins with")
    late, known = common.late_joiners, len(registered - common.late.keys())
    if (wanted := LateJoiners(common).expected) > known:
        setting = f"min-silos = {wanted}" if late == ANY else f"silos = {common.silos}"
        besides = f", besides late-joiners = {late}" if common.late else ""
        raise UserError(f"{setting}: only {known} are registered{besides}, the run would wait in vain")


def federation_file(connection: str) -> str:
    """The file of a federation of processes on this machine; empty for any other."""
    try:
        return find_local(connection).file
    except ValueError:
        return ""


def _own_data(connection: str, values: Mapping[str, object]) -> dict[str, object]:
    """The demo data of a federation on this machine as settings; ValueError where `values` ask for others."""
    from strategies.base.run_settings import defaults

    own: dict[str, object] = {}
    try:
        local = find_local(connection)
        demo, file, again = local.demo or {}, local.file, f"silofl up {local.file}"
    except ValueError:
        deployed = find_deployed(connection)
        if deployed is None:
            return {}
        demo, file = deployed.demo or {}, deployed.file
        again = f"silofl compose {file} --out docker-compose.yml && docker compose up --wait"
    own |= {key: demo[key] for key in ("dataset", "partition") if key in demo}
    for key in ("dataset", "partition", "data-dir"):
        asked = values.get(key) or own.get(key)
        unused = not demo and asked == defaults()[key]  # as the config.toml of an earlier run has it
        if asked != own.get(key) and not unused:
            has = f"{demo['dataset']}, {demo['partition']}, seed {demo['seed']}" if demo else "each silo's own file"
            raise UserError(
                f"{key} = {asked}: the data are the federation's own ({has}); to split other data, "
                f"change `demo` in {file} and `{again}`"
            )
    return own


def _of_the_file(connection: str, values: Mapping[str, object]) -> dict[str, Any]:
    """Return the federation file's settings of runs and data, if the file is on this machine.

    Raises UserError where ``values`` would train a silo that has the role held-out there.
    """
    from strategies.base.evaluation import EVALUATE
    from strategies.base.survey import SURVEY

    deployed = find_deployed(connection)
    file = federation_file(connection) or (deployed.file if deployed else "")
    if not file or not Path(file).is_file():
        return {}
    federation = read_federation(Path(file), check_data=False)
    held = "" if values.get("strategy") in (EVALUATE, SURVEY) else ",".join(federation.held_out)
    asked = {name.strip() for name in str(values.get("hold-out", held)).split(",")}
    if held and not asked >= set(federation.held_out):
        raise UserError(f"hold-out = {values['hold-out']!r}: {file} has {held} with `role: held-out`: name them too")
    own = {"agreed": federation.agreed, "hold-out": held}
    return {**federation.run, **{key: value for key, value in own.items() if value}}


def submit_and_follow(control: Control, app: bytes, settings: Mapping[str, Any], out: Path) -> None:
    """One Flower run of an app bundle from submission to end. Ctrl-C stops the run before it is passed on."""
    progress = Progress(out / "progress.jsonl")
    run_id, interrupted = submit(control, app, settings)
    try:
        if interrupted:
            raise KeyboardInterrupt
        follow(control, run_id, progress)
    except KeyboardInterrupt:
        print("stopping the run; press Ctrl-C again to leave it to itself", file=sys.stderr)
        stop_run(control, run_id)
        if settings.get("strategy") in ("evaluate", "survey"):  # which have no rounds to go on with
            raise
        again = f"silofl run --config {out / 'config.toml'} --out {out} --set resume=true"
        raise KeyboardInterrupt(f"continue with {again}") from None


def submit(control: Control, app: bytes, settings: Mapping[str, Any]) -> tuple[int, bool]:
    """Start the run; its number, and whether Ctrl-C was pressed meanwhile.

    Raises RunFailedError with Flower's own message where the run is refused.
    """
    with interrupts_noted() as interrupts:
        try:
            return control.start(app, settings), bool(interrupts)
        except ConnectionError as error:
            raise RunFailedError(f"the run was not submitted: {error}") from None


@contextlib.contextmanager
def interrupts_noted() -> Iterator[list[int]]:
    """Yield the list of Ctrl-C signals that arrive while a run is submitted; none of them ends the call.

    A call that ended half-way would leave a run without its number.
    """
    noted: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # which alone sees any
        yield noted
        return
    before = signal.signal(signal.SIGINT, lambda number, _: noted.append(number))
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)


class Progress:
    """The lines that a run adds to `progress.jsonl`, read as they come and printed to stderr."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = path.stat().st_size if path.exists() else 0  # what earlier runs of the study wrote
        self.error = ""
        self.round = 0

    def read(self) -> None:
        """Print the rounds that were added since the last call."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self.offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # still being written
                self.offset += len(line)
                event = json.loads(line)
                if event["event"] == "round":
                    self.round = event["round"]
                    print(round_line(event), file=sys.stderr, flush=True)
                elif event["event"] == "refused":
                    print(f"refused: {event['message']}", file=sys.stderr, flush=True)
                elif event["event"] in ("note", "transfer", "stopped"):
                    print(event["message"], file=sys.stderr, flush=True)
                elif event["event"] == "error":
                    self.error = event["message"]


def round_line(event: Mapping[str, Any]) -> str:
    """One round as a line: round, silos in, mean accuracy, seconds, bytes, and who was left out or bounded and why."""
    name = event.get("score", "accuracy")
    score = "-" if event[name] is None else f"{event[name]:.4f}"
    line = (
        f"{event['strategy']} seed {event['seed']}  round {event['round']}/{event['rounds']}  "
        f"{event['silos']} silos  {name} {score}  {event['seconds']:.1f} s  {event['bytes'] / 1e6:.1f} MB"
    )
    for key, word in (("rejected", "without"), ("bounded", "bounds")):
        if named := "; ".join(f"{silo}: {reason}" for silo, reason in event.get(key, {}).items()):
            line += f"  {word} {named}"
    return line


def follow(control: Control, run_id: int, progress: Progress) -> None:
    """Wait for the end of a run; RunFailedError with the reason unless it completed."""
    answered, silent = time.monotonic(), False
    while True:
        progress.read()
        try:
            now = control.run(run_id)
            answered, silent = time.monotonic(), False
        except ConnectionError as error:
            if time.monotonic() - answered > SILENCE_SECONDS:
                raise RunFailedError(f"run {run_id} is lost after round {progress.round}: {error}") from None
            if not silent:
                print(f"{error}; the run is taken for lost after {SILENCE_SECONDS:g} s", file=sys.stderr, flush=True)
            silent = True
            time.sleep(POLL_SECONDS)
            continue
        if now.finished:
            break
        time.sleep(POLL_SECONDS)
    progress.read()
    if now.status == "finished:completed":
        return
    if now.status == "finished:stopped":
        raise RunFailedError(
            f"run {run_id} was stopped after round {progress.round}; "
            f"it continues with --set resume=true --out {progress.path.parent}"
        )
    raise RunFailedError(
        f"run {run_id} failed after round {progress.round}: {reason_of(control, run_id, progress, now.details)}"
    )


def reason_of(control: Control, run_id: int, progress: Progress, details: str) -> str:
    """Return why a run failed: what the server app said, else what Flower says, else the end of the log."""
    if progress.error:
        return plain(progress.error)
    lines: list[str] = []
    with contextlib.suppress(ConnectionError):
        lines = [line.strip() for line in control.log(run_id).splitlines() if line.strip()]
    errors = [line for line in lines if line.partition(":")[0].endswith(("Error", "Exception"))]
    if errors and errors[-1].partition(": ")[2] not in details:
        details = f"{details} ({errors[-1]})"
    if details == "No heartbeat received from the task":
        details = "the server app ended without a word (killed, or out of memory)"
    if not details and lines:
        details = lines[-1]
    log = state_root() / control.connection.name / "logs" / "superlink.log"
    if not details and log.exists():
        details = " | ".join(last_lines(log, 3))
    return plain(details) or "the SuperLink gives no reason"


def plain(reason: str) -> str:
    """Flower's `<class 'a.B'>:<'text'>` as `B: text`."""
    return re.sub(r"<class '(?:[\w.]*\.)?(\w+)'>:<'(.*?)'>", r"\1: \2", reason)


def stop(connection: str = "") -> list[int]:
    """Stop every run that is under way; their numbers."""
    stopped = []
    with Control(read_connection(connection or default_connection())) as control:
        for one in control.runs():
            if not one.finished:
                stop_run(control, one.run_id)
                stopped.append(one.run_id)
    return stopped


def stop_run(control: Control, run_id: int) -> None:
    """Stop a run and wait until the SuperLink counts it as ended."""
    deadline = time.monotonic() + STOP_SECONDS
    control.stop(run_id)
    while not control.run(run_id).finished:
        if time.monotonic() > deadline:
            raise RunFailedError(f"run {run_id} does not stop; `silofl down` ends it with the federation")
        time.sleep(POLL_SECONDS)
