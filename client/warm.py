"""Warm silos: each ClientApp message runs in a process forked from one that has its imports done.

A SuperExec starts a `flwr-clientapp` process for every message; 3 s of that are imports. With the
directory of `install_shim` first on its PATH it starts `warm_shim.py` instead, which hands the task to
the *parent* of this file over a Unix socket::

    SuperExec -> shim  ~~socket~~  parent (imports done, never runs a task)
                   ~~~~~~~~~~~~~~~~  `- minder, one per message (forked)
                                          `- worker (forked): Flower's own clientapp entry

The parent only accepts and forks. The minder waits for the worker: it forwards the shim's signals, ends
the worker when the shim is gone or when the message's time to live is over, answers the message with an
error where the worker died without a reply (killed for memory, a crash in native code), so that the silo
is free at once instead of after Flower's heartbeat timeout, and tells the shim how the worker ended. Every
message has a process of its own, as in Flower; a parent's death touches no running message. Where no parent
answers, the shim starts a minder by itself, which forks a worker that does its own imports.

This file runs as a script and imports nothing of ours: an app module is taken from `sys.modules` first, so
a parent that had imported the package `client` would run the installed code instead of the app's. For the
same reason only third-party packages are imported ahead. Nothing is computed and CUDA is not touched
before the fork.

Four functions of Flower's `run_clientapp` are wrapped, warm or cold, in the task's own process: what was
pulled and what was pushed is noted for the minder, the app's SHA-256 is compared with the site's pins before it is
unpacked or imported, and the app is unpacked under another name and then renamed.

Environment:
    SILOFL_WARM_SOCKET   the parent's socket; empty: Flower's own start, without a warning
    SILOFL_WARM_RESPAWN  0: a shim that finds no parent does not start one
    SILOFL_WARM_LOG      where a parent that a shim started writes; default: beside the socket
    SILOFL_ALLOWED_APPS  a file of SHA-256 sums, or sums separated by commas; unset or empty: any app runs

Linux only; elsewhere use Flower's own start.
"""

import argparse
import atexit
import compileall
import contextlib
import ctypes
import fcntl
import gc
import hashlib
import importlib
import io
import json
import logging
import os
import select
import shlex
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

# What a silo's ClientApp imports, third-party only; a name that is not installed is passed over.
PRELOAD = (
    "flwr.supernode.cli.flwr_clientapp",
    "flwr.client",
    "flwr.clientapp",
    "flwr.serverapp",
    "flwr.serverapp.strategy",
    "httpcore",
    "numpy",
    "safetensors.torch",
    "statistics",
    "torch",
    "torch.func",
    "tqdm",
)
# What tells to which message a reply belongs: the arguments of Flower's `Metadata`.
METADATA = (
    "run_id",
    "message_id",
    "src_node_id",
    "dst_node_id",
    "reply_to_message_id",
    "group_id",
    "created_at",
    "ttl",
    "message_type",
)
GRACE_SECONDS = 5.0  # between SIGTERM and SIGKILL; Flower's own limit for its exit handlers is 5 s too
PR_SET_PDEATHSIG = 1
FATAL = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)  # signals at which Flower's entry leaves
LIBC = ctypes.CDLL(None, use_errno=True)


class AppRefusedError(Exception):
    """The app's SHA-256 is not among those this site allows."""


# --- set up, called by `silofl up` and by the image -------------------------------------------------------


def install_shim(directory: Path) -> Path:
    """Write `flwr-clientapp` into `directory`, which goes first on a SuperNode's PATH; returns its path.

    `flower-supernode`, beside it, is `supernode.py`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    here = Path(__file__).resolve().parent
    scripts = {"flower-supernode": ("-P", "supernode.py"), "flwr-clientapp": ("-I -S", "warm_shim.py")}
    for name, (options, script) in scripts.items():
        temporary = directory / f".{name}.{os.getpid()}"
        # /bin/sh, because a shebang line holds neither spaces nor a long path.
        python, file = shlex.quote(sys.executable), shlex.quote(str(here / script))
        temporary.write_text(f'#!/bin/sh\nexec {python} {options} {file} "$@"\n')
        temporary.chmod(0o755)
        temporary.rename(directory / name)
    return directory / "flwr-clientapp"


def parent_command(socket_path: Path) -> list[str]:
    """The command line that runs the warm parent at `socket_path`."""
    return [sys.executable, "-P", str(Path(__file__).resolve()), "serve", str(socket_path)]


def lock_path(socket_path: Path) -> Path:
    """The file that the parent at `socket_path` holds locked for as long as it lives; its content is its pid."""
    return socket_path.with_name(socket_path.name + ".lock")


def parent_pid(socket_path: Path) -> int | None:
    """The process number of the parent at `socket_path`; None where none runs."""
    try:
        with lock_path(socket_path).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return None
    except BlockingIOError:
        return int(lock_path(socket_path).read_text() or 0) or None
    return None


# --- the parent -------------------------------------------------------------------------------------------


def serve(path: Path, modules: tuple[str, ...]) -> None:
    """Import `modules`, then fork a minder for every connection; ends at SIGTERM or SIGINT.

    One parent per socket: where another one holds the lock this one leaves with exit code 0.
    """
    lock = os.open(lock_path(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    for _ in range(10):  # `parent_pid` may hold it for a moment
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        time.sleep(0.05)
    else:
        say("another parent serves this socket")
        return
    os.ftruncate(lock, 0)
    os.write(lock, str(os.getpid()).encode())
    os.chdir(path.parent)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path.name)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    listener.bind(path.name)
    os.umask(mask)
    # Shims that come while the imports run wait in the backlog: no slower than a start of their own.
    listener.listen(1024)
    started = time.monotonic()
    for name in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what lives now is shared with the children: keep their collector off its pages
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # minders are reaped by the kernel
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, leave)
    say(f"ready in {time.monotonic() - started:.1f} s")
    while True:
        connection, _ = listener.accept()
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            pid = os.fork()
        except OSError as error:  # no memory or no process left: the shim sees the hang-up and starts cold
            say(f"cannot fork: {error}")
            connection.close()
            continue
        if pid == 0:
            listener.close()
            os.close(lock)
            mind(connection)
        connection.close()


def leave(number: int, _: object) -> NoReturn:
    """End the parent; minders and their workers go on."""
    os._exit(0)


def say(text: str) -> None:
    """One line in the parent's log."""
    print(
        f"{time.strftime('%Y-%m-%d %H:%M:%S')} warm parent {os.getpid()}: {text}", file=sys.stderr, flush=True
    )


# --- the minder, one per message --------------------------------------------------------------------------


def mind(connection: socket.socket) -> NoReturn:
    """Take over one task from a shim, run it in a forked worker and follow it to its end."""
    try:
        os.setsid()
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        request, fds = receive_request(connection)
        adopt(request, fds)
        connection.sendall(b"R")
        if connection.recv(1) != b"G":
            os._exit(0)  # the shim gave up waiting and starts the task itself
        report, worker_report = socket.socketpair()
        sys.stderr.flush()
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        worker = os.fork()
        if worker == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for fd in (wake_read, wake_write):
                os.close(fd)
            connection.close()
            report.close()
            run_worker(worker_report)
        worker_report.close()
        code = follow(connection, report, wake_read, worker)
        with contextlib.suppress(OSError):  # the shim may be gone
            connection.sendall(code.to_bytes(4, "big", signed=True))
    except BaseException:
        with contextlib.suppress(BaseException):
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def receive_request(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """The shim's request and its three standard streams."""
    connection.settimeout(30.0)
    _, uid, _ = peer(connection)
    if uid != os.geteuid():
        raise PermissionError(f"a process of user {uid} asked for a task")
    data, fds, _, _ = socket.recv_fds(connection, 1 << 16, 3)
    while len(data) < 4 or len(data) < 4 + int.from_bytes(data[:4], "big"):
        part = connection.recv(1 << 16)
        if not part:
            raise ConnectionError("the shim hung up in its request")
        data += part
    request: dict[str, Any] = json.loads(data[4:])
    return request, list(fds)


def peer(connection: socket.socket) -> tuple[int, int, int]:
    """(pid, uid, gid) of the process at the other end."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    values = memoryview(data).cast("i")
    return values[0], values[1], values[2]


def adopt(request: dict[str, Any], fds: list[int]) -> None:
    """Make this process look like the one the shim would have been: streams, directory, environment, argv."""
    for target, fd in enumerate(fds):
        os.dup2(fd, target)
        os.close(fd)
    sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
    os.chdir(request["cwd"])
    os.umask(request["umask"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = ["flwr-clientapp", *request["argv"]]


def follow(connection: socket.socket, report: socket.socket, wake: int, worker: int) -> int:
    """Wait for the worker; returns its exit code, or minus the number of the signal that ended it."""
    report.setblocking(False)
    note: dict[str, Any] = {}
    notes = b""
    ends: float | None = None  # when the message's time to live is over
    kill_at: float | None = None
    watched: list[Any] = [connection, report, wake]

    def end(reason: str) -> None:
        # The error reply goes out first: Flower's own exit handler gives the task back without one, and
        # the SuperNode would wait for it for ever.
        nonlocal kill_at
        if kill_at is None:
            answer(note, reason)
            kill_at = time.monotonic() + GRACE_SECONDS
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGTERM)

    while True:
        pid, status = os.waitpid(worker, os.WNOHANG)
        if pid == worker:
            break
        limits = [limit for limit in (ends, kill_at) if limit is not None]
        timeout = max(0.0, min(min(limits) - time.monotonic(), 3600.0)) if limits else None
        readable = select.select(watched, [], [], timeout)[0]
        if wake in readable:
            os.read(wake, 512)
        if report in readable:
            data = report.recv(1 << 16)
            if not data:
                watched.remove(report)
            notes += data
            while b"\n" in notes:
                line, notes = notes.split(b"\n", 1)
                note.update(json.loads(line))
                if ends is None and "message" in note and not note.get("replied"):
                    # Counted from here, as the server's clock and ours may differ: never too early.
                    ends = time.monotonic() + note["message"]["ttl"]
        if connection in readable:
            try:
                data = connection.recv(64)
            except OSError:
                data = b""
            for number in data:
                if number in FATAL:
                    answer(note, f"ClientApp process ended by {signal.Signals(number).name}")
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker, number)
            if not data:
                watched.remove(connection)
                end("ClientApp process ended with its SuperExec")
        if ends is not None and time.monotonic() >= ends:
            ends = float("inf")
            print("ERROR: the message's time to live is over; ending the ClientApp process", file=sys.stderr)
            end("ClientApp was still running at the end of the message's time to live")
        if kill_at is not None and time.monotonic() >= kill_at:
            kill_at = None
            kill_group(worker)
    kill_group(worker)
    with contextlib.suppress(OSError, json.JSONDecodeError):  # what it noted just before it died
        for line in (notes + report.recv(1 << 16)).splitlines():
            note.update(json.loads(line))
    code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    if code < 0:
        name = signal.Signals(-code).name
        cause = " (out of memory, or killed by hand)" if -code == signal.SIGKILL else ""
        reason = f"ClientApp process was ended by {name}{cause}"
        print(f"ERROR: {reason}", file=sys.stderr)
    else:
        reason = f"ClientApp process left with exit code {code} and without a reply"
    answer(note, reason)
    finish(note, reason)
    return code


def kill_group(worker: int) -> None:
    """SIGKILL for the worker and whatever it started (data loaders) in its process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(worker, signal.SIGKILL)


def answer(note: dict[str, Any], reason: str) -> None:
    """Reply to the noted message with an error, unless it was never pulled or already has its reply."""
    if "message" not in note or note.get("replied"):
        return
    note["replied"] = True
    from flwr.app import Context, Error, Message, Metadata, RecordDict
    from flwr.app.message import make_message
    from flwr.common.constant import ErrorCode
    from flwr.supernode.runtime.run_clientapp import push_message

    fields: dict[str, Any] = note["message"]
    if time.time() > fields["created_at"] + fields["ttl"] - 1.0:
        # Flower makes no reply to a message whose time is over, and the SuperNode waits for one; this one frees
        # the SuperNode, and the server drops it.
        fields = fields | {"created_at": time.time(), "ttl": 60.0}
    message = make_message(metadata=Metadata(**fields), content=RecordDict())
    reply = Message(Error(code=ErrorCode.CLIENT_APP_CRASHED, reason=reason), reply_to=message)
    context = Context(message.metadata.run_id, note["node_id"], {}, RecordDict(), {})
    with runtime_api() as client:
        push_message(client, reply, context)


def finish(note: dict[str, Any], reason: str) -> None:
    """Give the task back as failed, unless the worker did: a task that lapses fails the run's next message."""
    if "message" not in note or note.get("finished"):
        return
    from flwr.common.constant import SubStatus
    from flwr.supernode.runtime.run_clientapp import push_task_output

    with runtime_api() as client:
        push_task_output(client, None, SubStatus.FAILED, reason)


@contextlib.contextmanager
def runtime_api() -> Iterator[Any]:
    """The SuperNode's Runtime API with the task's token, as the worker has it; a failure is only a warning."""
    from flwr.common.args import try_obtain_flwr_app_token
    from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
    from flwr.supercore.retry import make_simple_http_retry_invoker
    from flwr.supercore.runtime import RuntimeHttpClient
    from flwr.supercore.tls import validate_and_resolve_root_certificates
    from flwr.supernode.cli.flwr_clientapp import _parse_args_run_flwr_clientapp

    try:
        args = _parse_args_run_flwr_clientapp().parse_args(sys.argv[1:])
        retry = make_simple_http_retry_invoker()
        retry.max_tries = 1  # a SuperNode that is not there needs no answer
        client = RuntimeHttpClient.from_server_address(
            server_address=args.runtime_api_address,
            insecure=args.insecure,
            root_certificates=validate_and_resolve_root_certificates(args.root_certificates, args.insecure),
            interceptors=[
                RuntimeVersionHttpInterceptor(component_name="flwr-clientapp"),
                RuntimeTokenHttpInterceptor(try_obtain_flwr_app_token(args)),
            ],
            retry_invoker=retry,
        )
        yield client
        client.close()
    except BaseException as error:  # Flower turns a refused token into SIGINT
        print(f"WARNING: could not report that the ClientApp failed: {error!r}", file=sys.stderr)


# --- the worker: one task --------------------------------------------------------------------------------


def run_worker(report: socket.socket) -> NoReturn:
    """Become the `flwr-clientapp` process of one message."""
    os.setsid()
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # no worker outlives its minder
    with contextlib.suppress(OSError):  # when memory runs out, rather this process than the SuperNode
        Path("/proc/self/oom_score_adj").write_text("500")
    if "numpy" in sys.modules:  # not every message the same "random" numbers; `random` does this by itself
        sys.modules["numpy"].random.seed()
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(threads))  # libgomp read the parent's value at its start
    # Of the exit handlers only logging's and the app's own: PyTorch's are for its compiler and cost up to 35 ms.
    atexit._clear()
    atexit.register(logging.shutdown)
    code = run_task(report)
    # The interpreter's own shutdown takes half a second with PyTorch loaded; what it does for us is this.
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            stream.flush()
    os._exit(code)


def run_task(report: socket.socket) -> int:
    """Flower's clientapp entry on `sys.argv` with our wrappers in it; returns the exit code."""
    try:
        wrap_flower(report)
        from flwr.supernode.cli.flwr_clientapp import flwr_clientapp

        flwr_clientapp()
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return (stop.code or 0) & 0xFF
        print(stop.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def wrap_flower(report: socket.socket) -> None:
    """Wrap four functions of Flower's `run_clientapp` (flwr 1.39) in this process.

    Raises AttributeError where Flower has moved them: better no task than one without the pins.
    """
    flower: Any = importlib.import_module("flwr.supernode.runtime.run_clientapp")
    pull, install = flower.pull_task_input, flower.install_from_fab
    push, push_output = flower.push_message, flower.push_task_output

    def note(**fields: Any) -> None:
        with contextlib.suppress(OSError):
            report.sendall(json.dumps(fields).encode() + b"\n")

    def pull_task_input(client: Any) -> Any:
        message, context, run, fab = pull(client)
        note(message={name: getattr(message.metadata, name) for name in METADATA}, node_id=context.node_id)
        return message, context, run, fab

    def install_from_fab(fab_file: Any, install_dir: Path | None = None, skip_prompt: bool = False) -> Path:
        content: bytes = fab_file if isinstance(fab_file, bytes) else fab_file.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        check_pin(digest)
        return unpack(content, digest, install)

    def push_message(client: Any, message: Any, context: Any) -> None:
        push(client, message, context)
        note(replied=True)

    flower.pull_task_input = pull_task_input
    flower.install_from_fab = install_from_fab

    def push_task_output(*args: Any, **kwargs: Any) -> None:
        push_output(*args, **kwargs)
        note(finished=True)

    flower.push_message = push_message
    flower.push_task_output = push_task_output


def check_pin(digest: str) -> None:
    """Raise AppRefusedError unless SHA-256 `digest` is allowed at this site (`SILOFL_ALLOWED_APPS`)."""
    pins = os.environ.get("SILOFL_ALLOWED_APPS", "")
    if not pins:
        return
    try:
        allowed = set(read_pins(pins))
    except OSError as error:
        raise refused(f"app {digest} refused: cannot read the allowed apps: {error}") from None
    if digest not in allowed:
        where = "SILOFL_ALLOWED_APPS" if is_sums(pins) else pins
        raise refused(f"app {digest} refused: its SHA-256 is not among the {len(allowed)} listed in {where}")


def refused(line: str) -> AppRefusedError:
    """The error, after its one line is in the silo's log."""
    print(f"ERROR: {line}", file=sys.stderr, flush=True)
    return AppRefusedError(line)


def is_sums(pins: str) -> bool:
    """Whether a value of `SILOFL_ALLOWED_APPS` is a list of sums, and not a file's name."""
    return all(len(part) == 64 and not set(part) - set("0123456789abcdef") for part in split(pins))


def split(text: str) -> list[str]:
    """The words of a text, in lower case, separated by commas or white space."""
    return text.replace(",", " ").lower().split()


def read_pins(pins: str) -> Iterator[str]:
    """The SHA-256 sums of `SILOFL_ALLOWED_APPS`; in a file one per line, `#` starts a comment."""
    if is_sums(pins):
        yield from split(pins)
        return
    for line in Path(pins).expanduser().read_text(encoding="utf-8").splitlines():
        yield from split(line.partition("#")[0])[:1]  # `sha256sum` writes the file's name after the sum


def unpack(content: bytes, digest: str, install: Any) -> Path:
    """Flower's `install_from_fab`, except that a half-written app is never taken for a whole one.

    Flower unpacks straight into `FLWR_HOME/apps/PUBLISHER.NAME.VERSION.HASH8` and later takes that
    directory as it is. Here it is complete and of this very app exactly if it holds the full SHA-256.
    """
    from flwr.supercore.utils import get_flwr_home

    apps = get_flwr_home() / "apps"
    for path in apps.glob(f"*.{digest[:8]}"):
        mark = path / ".sha256"
        if mark.is_file() and mark.read_text() == digest:
            return path
    temporary = apps / f".new-{os.getpid()}"
    with contextlib.redirect_stdout(io.StringIO()):  # it would name the temporary directory
        made: Path = install(content, install_dir=temporary, skip_prompt=True)
    print(f"app {made.name}, SHA-256 {digest}")
    compileall.compile_dir(
        made, quiet=2
    )  # once, and not in every process where PYTHONDONTWRITEBYTECODE is set
    (made / ".sha256").write_text(digest)
    final = apps / made.name
    shutil.rmtree(final, ignore_errors=True)
    made.rename(final)
    shutil.rmtree(temporary, ignore_errors=True)
    return final


# --- as a script ------------------------------------------------------------------------------------------


def main() -> None:
    """`serve SOCKET` runs a parent, `once FD` one task without a parent, `shim DIRECTORY` installs the shim."""
    parser = argparse.ArgumentParser(description="Warm silos for Flower SuperNodes.")
    commands = parser.add_subparsers(dest="command", required=True)
    server = commands.add_parser("serve", help="run the warm parent")
    server.add_argument("socket", type=Path)
    server.add_argument("--import", dest="modules", action="append", help="a module to import ahead (repeat)")
    once = commands.add_parser("once", help="run the one task that comes over an open socket")
    once.add_argument("fd", type=int)
    shim = commands.add_parser("shim", help="write the flwr-clientapp that goes first on PATH")
    shim.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "serve":
        serve(arguments.socket.absolute(), tuple(arguments.modules or PRELOAD))
    elif arguments.command == "once":
        mind(socket.socket(fileno=arguments.fd))
    else:
        print(install_shim(arguments.directory))


if __name__ == "__main__":
    main()
