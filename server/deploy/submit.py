"""Submission of runs (`silofl run`, `silofl stop`): submit as `flwr run` does, follow the run, report a failure.

A study (several methods or seeds) is a sequence of Flower runs in one run directory. All use the app from the start of
the study. The server app appends a JSON line per round to `progress.jsonl` there. The end of a run is queried from the
SuperLink. So a run that dies before its first round, or with its server app, is also detected.
"""

from __future__ import annotations

import contextlib
import getpass
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from client.flower.apps import build
from client.protocol.run_settings import is_on
from partitions.common.errors import RunFailedError, UserError
from partitions.common.files import share_new_files, write_atomically
from server.deploy.control import Control, read_connection
from server.deploy.federation import read_federation
from server.deploy.following import POLL_SECONDS, RunFollower, follow, resume_command
from server.deploy.local.record import (
    Deployed,
    LocalFederation,
    UpFederation,
    find_federation,
    find_local,
)
from server.deploy.room.listing import find_named_run, named_runs
from server.deploy.room.queue import INTERRUPTED, UNTRAINED
from server.results.reading import NAME

if TYPE_CHECKING:
    from server.results.run_directory import RunDirectory
    from strategies.base.settings import Common, Value

STOP_SECONDS = 60.0


def default_connection() -> str:
    """Return the connection of the only federation that is up, from `silofl up` or `silofl credentials`."""
    return (find_federation() or find_local()).connection.name


def run(
    values: Mapping[str, object],
    connection: str = "",
    app: Path | None = None,
    fill: Callable[[Path], object] = lambda directory: None,
    *,
    name: str = "",
    now: bool = False,
) -> Path:
    """Run one method, or a study, on a federation; return the run directory.

    ``values``: settings as on the command line; the default of `silos` is the online silos and the late joiners.
    ``connection``: name of a `flwr` connection; default: from `silofl up`. ``app``: directory of the Flower app;
    default: this checkout. ``fill`` may put files into the run directory before the run is submitted. ``name``: of the
    run; default: method and date. ``now``: it does not wait in the queue.

    Raises UserError: an invalid setting, no such connection, data that are not the federation's.
    Raises RunFailedError: the run failed at submission, at a silo or at the server, or was stopped.
    Raises KeyboardInterrupt: after the run was stopped.
    """
    from server.results.study import study_config, study_runs

    connection = connection or default_connection()
    bundle = build(app or app_directory())
    with Control(read_connection(connection)) as control:
        up = find_federation(connection)
        runs = study_runs(_with_the_federations(up, values, control))
        first = runs[0].common
        if not first.resume:
            _check_silos(first, {node.name for node in control.nodes()})
        config = study_config(runs)
        out, theirs = _places(up, first.out, str(config["strategy"]))
        file = up.file if isinstance(up, LocalFederation) else ""
        # The server in its container is another user
        with share_new_files() if theirs != out else contextlib.nullcontext():
            directory = open_directory(out, config, file, resume=first.resume)
            fill(directory.path)
        try:
            changed = {"out": str(theirs), "resume": first.resume}
            members = [{**member.flat(), **changed} for member in runs]
            method = first.strategy if len(runs) == 1 else "study"
            words = {"name": name, "now": now, "method": method}
            submit_and_follow(control, bundle, members, directory.path, words)
        finally:
            directory.end()
    return directory.path


def _places(up: UpFederation | None, named: str, strategy: str) -> tuple[Path, Path]:
    """Return the run directory on this machine, and at the server. ``named``: the setting `out`."""
    from server.results.run_directory import default_out

    out = (Path(named) if named else default_out(strategy)).absolute()
    if not isinstance(up, Deployed):
        return out, out
    out = out if named else Path(up.runs, out.name)
    return out, up.in_container(out)


def open_directory(
    out: Path, config: Mapping[str, Value], federation: str, *, resume: bool
) -> RunDirectory:
    """Create or reopen the run directory, mark it as a study's for the server app, and return it."""
    from server.results.run_directory import RunDirectory

    with RunDirectory.open(out, config, resume=resume, stays=True) as directory:
        # The report reads the federation's path from it
        write_atomically(directory.path / "study", federation)
    return directory


def app_directory() -> Path:
    """Return the directory of silofl's own Flower app."""
    directory = Path(__file__).resolve().parents[2]
    if not (directory / "pyproject.toml").is_file():
        raise UserError(
            f"there is no pyproject.toml in {directory}: run silofl from a checkout, installed with pip -e"
        )
    return directory


def _silos_before(values: Mapping[str, object]) -> int:
    """Return the number of silos of the run to resume; 0: no run is resumed. They need not be online."""
    from server.results.run_directory import read_toml

    config = Path(str(values.get("out") or "")) / "config.toml"
    resumed = is_on(values, "resume") and bool(values.get("out")) and config.is_file()
    return cast(int, read_toml(config)["silos"]) if resumed else 0


def _silos_online(control: Control, late: str) -> int:
    """Return the number of silos that are online or may join late.

    The run does not wait for hospitals that have not joined yet or have left.
    """
    from strategies.base.newcomers import ANY

    nodes = control.nodes()
    offline = {node.name for node in nodes if node.status != "online"}
    coming = (
        offline
        if late == ANY
        else {entry.partition("=")[0].strip() for entry in late.split(",") if "=" in entry}
    )
    if left := sorted(offline - coming):
        print(
            f"without {', '.join(left)}: not online (--set silos={len(nodes)} waits)",
            file=sys.stderr,
        )
    online = {node.name for node in nodes} - offline
    return max(1, len(online | coming))


def _check_silos(common: Common, registered: Set[str]) -> None:
    """Raise UserError if the run would wait for silos that are not registered, or lacks min-silos for ANY."""
    from server.run.registration.data_summaries import LateJoiners
    from strategies.base.newcomers import ANY

    if common.late_joiners == ANY and not common.min_silos:
        raise UserError(
            f"late-joiners = {ANY}: min-silos is wanted too, the number of silos that the run begins with"
        )
    late = common.late_joiners
    known = len(registered - common.late.keys())
    if (wanted := LateJoiners(common).expected) > known:
        setting = f"min-silos = {wanted}" if late == ANY else f"silos = {common.silos}"
        besides = f", besides late-joiners = {late}" if common.late else ""
        raise UserError(
            f"{setting}: only {known} are registered{besides}, the run would wait in vain"
        )


def _with_the_federations(
    up: UpFederation | None, values: Mapping[str, object], control: Control
) -> dict[str, object]:
    """Return the settings with those that the federation has, and the number of silos."""
    settings = dict(values)
    if up:
        settings = {**_own_data(up, values), **_of_the_file(up, values), **values}
    if "silos" not in settings:
        late = str(settings.get("late-joiners", ""))
        settings["silos"] = _silos_before(settings) or _silos_online(control, late)
    return settings


def _own_data(up: UpFederation, values: Mapping[str, object]) -> dict[str, object]:
    """Return a federation's demo data as settings. Raises UserError if `values` request other data."""
    from strategies.base.run_settings import defaults, parse_settings

    demo = up.demo or {}
    demo_settings = {
        **{key: demo[key] for key in ("dataset", "partition") if key in demo},
        **demo.get("settings", {}),
    }
    split = {key: values[key] for key in demo.get("settings", {}) if key in values}
    # Typed
    values = {
        **values,
        **{key: parse_settings({**demo_settings, **split}).flat()[key] for key in split},
    }
    for key in ("dataset", "partition", "data-dir", *demo.get("settings", {})):
        wanted = values.get(key) or demo_settings.get(key)
        unused = (
            not demo and wanted == defaults()[key]
        )  # from the config.toml of an earlier run
        if wanted != demo_settings.get(key) and not unused:
            has = (
                f"{demo['dataset']}, {demo['partition']}, seed {demo['seed']}"
                if demo
                else "each silo's own file"
            )
            again = f"silofl up {up.file}"
            if isinstance(up, Deployed):
                again = f"silofl compose {up.file} --out docker-compose.yml && docker compose up --wait"
            raise UserError(
                f"{key} = {wanted}: the data are the federation's own ({has}); to split other data, "
                f"change `demo` in {up.file} and `{again}`"
            )
    return demo_settings


def _of_the_file(up: UpFederation, values: Mapping[str, object]) -> dict[str, Any]:
    """Return the settings for runs and data in the federation file, if the file is on this machine.

    Raises UserError if ``values`` would train a silo with the role held-out.
    """
    if not Path(up.file).is_file():
        return {}
    federation = read_federation(Path(up.file), check_data=False)
    held = federation.held_out(values.get("strategy"))
    named = {name.strip() for name in str(values.get("hold-out", ",".join(held))).split(",")}
    if not named >= {*held}:
        names = ",".join(held)
        raise UserError(
            f"hold-out = {values['hold-out']!r}: {up.file} has {names} with `role: held-out`: name them too"
        )
    stated = {"agreed": federation.agreed, "hold-out": ",".join(held)}
    return {**federation.run, **{key: value for key, value in stated.items() if value}}


def submit_and_follow(
    control: Control,
    app: bytes,
    members: Sequence[Mapping[str, Any]],
    out: Path,
    words: Mapping[str, object] = {},
) -> None:
    """Submit a run of an app bundle and follow its members to the end. Ctrl-C stops the run, then is raised.

    ``members``: the settings of each; ``words``: the run's name, method, now.
    """
    progress = RunFollower(out / "progress.jsonl")
    name, numbers, interrupted = submit(control, app, members, words)
    print(f"run {name}", file=sys.stderr, flush=True)
    write_atomically(out / NAME, name, mode=0o644)  # for the report, which a container writes
    try:
        if interrupted:
            raise KeyboardInterrupt
        for number in numbers:
            follow(control, number, progress, name)
    except KeyboardInterrupt:
        print("stopping the run; press Ctrl-C again to leave it to itself", file=sys.stderr)
        stop_run(control, numbers)
        if members[0].get("strategy") in UNTRAINED:
            raise
        raise KeyboardInterrupt(f"continue with {resume_command(out)}") from None


def submit(
    control: Control,
    app: bytes,
    members: Sequence[Mapping[str, Any]],
    words: Mapping[str, object],
) -> tuple[str, list[int], bool]:
    """Start the run; return its name, its members' numbers, and whether Ctrl-C was pressed meanwhile.

    Raises RunFailedError with the server's message if the run is refused; the members that were started are stopped.
    """
    name, numbers = "", list[int]()
    with contextlib.suppress(OSError, KeyError):  # a user without a name
        words = {"owner": getpass.getuser(), **words}
    with interrupts_noted() as interrupts:
        try:
            for settings in members:
                number, name = control.start(app, settings, {**words, "of": name})
                numbers.append(number)
            return name, numbers, bool(interrupts)
        except ConnectionError as error:
            try:
                for number in reversed(numbers):
                    control.stop(number)
            except ConnectionError:
                raise RunFailedError(
                    f"only {len(numbers)} of the {len(members)} parts of run {name} were submitted: {error}; "
                    f"`silofl stop {name}` ends them"
                ) from None
            raise RunFailedError(f"the run was not submitted: {error}") from None


@contextlib.contextmanager
def interrupts_noted() -> Iterator[list[int]]:
    """Yield a list that collects Ctrl-C signals while a run is submitted; none of them ends the call.

    An interrupted call would leave a run whose number is unknown.
    """
    noted: list[int] = []
    # Only the main thread receives signals
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return
    before = signal.signal(signal.SIGINT, lambda number, _: noted.append(number))
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)


def stop(connection: str = "", name: str = "") -> str:
    """Stop the run of a name, or the only one that is on; return its name, empty if there is none.

    Raises UserError for a name of none, and without a name where there are several.
    """
    with Control(read_connection(connection or default_connection())) as control:
        run = find_named_run(named_runs(control), name)
        if run and run.state == INTERRUPTED:
            control.stop(int(run.members[-1]))
            return run.name
        if run is None or not run.on:
            return ""
        stop_run(control, [int(number) for number in run.members])
        return run.name


def stop_run(control: Control, members: Sequence[int]) -> None:
    """Stop a run, the last member first, and wait until the SuperLink lists all as finished."""
    deadline = time.monotonic() + STOP_SECONDS
    for number in reversed(members):
        if not control.run(number).finished:
            control.stop(number)
    while not all(control.run(number).finished for number in members):
        if time.monotonic() > deadline:
            raise RunFailedError(
                f"run {members[0]} does not stop; `silofl down` ends it with the federation"
            )
        time.sleep(POLL_SECONDS)
