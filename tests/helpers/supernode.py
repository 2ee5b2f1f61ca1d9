"""A SuperNode for tests of what runs in a silo's own processes, without a SuperLink.

`Silo` is Flower's own SuperNode state and Runtime API, served from this process: a test gives it a message and an app,
starts `flwr-clientapp` through the shim as a SuperNode would, and looks at the reply. The parent imports Flower only,
so it is ready in about a second.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import uvicorn
from apps import project
from flwr.app import ConfigRecord, Context, Message, Metadata, RecordDict
from flwr.app.message import make_message
from flwr.cli.build import build_fab_from_disk
from flwr.common.config import get_fab_config, get_metadata_from_config
from flwr.supercore.constant import TaskType
from flwr.supercore.fab import Fab
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run
from flwr.supernode.main import create_app
from flwr.supernode.nodestate import NodeStateFactory
from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState
from flwr.supernode.start_client_internal import _insert_message

from client.site.runtime.prefork.install import install_shim, template_command

RUN, NODE = 11, 7
LISTED = "allowed-apps: this build is listed"
RUN_CONFIG: dict[str, Any] = {"strategy": "fedavg", "seed": 7}
CLIENT = """
    import os, pathlib, signal, sys, time
    from flwr.app import ConfigRecord, Message, RecordDict
    from flwr.clientapp import ClientApp
    from helper import VERSION

    pathlib.Path(os.environ["MARKS"], f"imported-{VERSION}").touch()
    app = ClientApp()

    @app.train()
    def train(message, context):
        behaviour = message.content["config"]["behaviour"]
        pathlib.Path(os.environ["MARKS"], "pid").write_text(str(os.getpid()))
        print("app says", VERSION, flush=True)
        print("app warns", file=sys.stderr, flush=True)
        if behaviour == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if behaviour == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        if behaviour == "leaves":
            os._exit(3)
        if behaviour == "raises":
            raise ValueError("no such column")
        if behaviour == "hangs":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True:
                time.sleep(60)
        if behaviour == "waits":
            time.sleep(60)
        if behaviour == "waits once" and not pathlib.Path(os.environ["MARKS"], "waited").exists():
            pathlib.Path(os.environ["MARKS"], "waited").touch()
            time.sleep(60)
        seen = context.state.config_records.setdefault("seen", ConfigRecord({"messages": 0}))
        seen["messages"] += 1
        app.served = getattr(app, "served", 0) + 1
        answer = {"version": VERSION, "pid": os.getpid(), "cwd": os.getcwd(), "argv": sys.argv[0],
                 "secret": os.environ.get("SECRET", ""), "stray": os.environ.get("STRAY", ""),
                 "warm": "wave" in sys.modules or "torch" in sys.modules,
                 "served": app.served, "messages": seen["messages"]}
        return Message(RecordDict({"answer": ConfigRecord(answer)}), reply_to=message)
"""


class Silo:
    """A SuperNode's state and Runtime API, and the environment of the processes that it starts."""

    def __init__(self, folder: Path) -> None:
        stores = ObjectStoreFactory()
        factory = NodeStateFactory(objectstore_factory=stores)
        self.state, self.store = factory.state(), stores.store()
        self.state.set_node_id(NODE)
        config = uvicorn.Config(create_app(factory), host="127.0.0.1", port=0, log_level="critical")
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        wait_until(lambda: self.server.started)
        self.address = f"127.0.0.1:{self.server.servers[0].sockets[0].getsockname()[1]}"
        self.folder, self.marks = folder, folder / "marks"
        self.marks.mkdir()
        (folder / "work").mkdir()
        self.socket = folder / ("a directory whose name is longer than a socket's address may be " * 2) / "warm.sock"
        self.socket.parent.mkdir()
        install_shim(folder / "bin")
        scripts = str(Path(sys.executable).parent)
        self.environment = {
            **os.environ,
            "PATH": os.pathsep.join([str(folder / "bin"), scripts, os.defpath]),
            "FLWR_HOME": str(folder / "flower"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "MARKS": str(self.marks),
            "SECRET": "of this silo",
            "SILOFL_WARM_SOCKET": str(self.socket),
            "SILOFL_WARM_RESPAWN": "0",
        }
        self.messages = 0
        self.node_config: dict[str, Any] = {"name": "north", "state-dir": str(folder / "state")}
        self.log = folder / "state" / "audit"

    def app(self, version: str) -> Fab:
        """An app whose two modules are the same in every version but for one line of the second."""
        folder = self.folder / f"app-{version}"
        folder.mkdir(exist_ok=True)
        (folder / "main.py").write_text(textwrap.dedent(CLIENT))
        (folder / "helper.py").write_text(f"VERSION = {version!r}\n")
        (folder / "pyproject.toml").write_text(project("main:app", "main:app"))
        content = build_fab_from_disk(folder)
        return Fab(hashlib.sha256(content).hexdigest(), content, {})

    def message(self, fab: Fab, *args: Any, **kwargs: Any) -> list[str]:
        """As :meth:`store_message`; the command that starts the message's task."""
        token = self.state.claim_task(self.store_message(fab, *args, **kwargs))
        assert token is not None
        return ["flwr-clientapp", *self.options, "--token", token]

    @property
    def options(self) -> list[str]:
        return ["--runtime-api-address", self.address, "--insecure"]

    def store_message(
        self,
        fab: Fab,
        behaviour: str = "",
        ttl: float = 60.0,
        node_config: dict[str, Any] | None = None,
        run_config: dict[str, Any] | None = None,
        kind: str = "train",
        run_id: int = 0,
        **named: str,
    ) -> int:
        """Store a message for the app as a SuperNode does; its task. Each is of a run of its own, if none is named."""
        self.messages += 1
        run_id = run_id or RUN + self.messages
        run = Run.create_empty(run_id)
        run.fab_id, run.fab_version = get_metadata_from_config(get_fab_config(fab.content))
        run.fab_hash, run.series_id = fab.hash_str, run_id
        vars(run).update(named)  # `fab_id`, `fab_version`: the server's word
        self.state.store_run(run)
        self.state.store_fab(fab)
        self.state.set_run_series_context(
            run_id, Context(run_id, NODE, node_config or self.node_config, RecordDict(), run_config or RUN_CONFIG)
        )
        metadata = Metadata(
            run_id=run_id,
            message_id="",
            src_node_id=1,
            dst_node_id=NODE,
            reply_to_message_id="",
            group_id="1",
            created_at=time.time(),
            ttl=ttl,
            message_type=kind,
        )
        content = RecordDict({"config": ConfigRecord({"behaviour": behaviour, "round": 3, "run": "today"})})
        _insert_message(make_message(metadata=metadata, content=content), self.state, self.store)
        task = self.state.create_task(task_type=TaskType.CLIENT_APP, run_id=run_id, fab_hash=fab.hash_str)
        assert task is not None
        return task

    def start(self, command: list[str], **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            env=self.environment | environment,
            cwd=self.folder / "work",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, command: list[str], **environment: str) -> tuple[int, str, str]:
        """Exit code, stdout and stderr of one task."""
        process = self.start(command, **environment)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def reply(self) -> Message:
        """The one reply that there is now."""
        (message,) = self.state.get_messages(is_reply=True)
        return message

    def replied(self) -> bool:
        """Whether a reply is there; it stays there."""
        assert isinstance(self.state, InMemoryNodeState)
        return any(entry.message.metadata.reply_to_message_id for entry in self.state.msg_store.values())

    def reason(self) -> str:
        """Why the one reply that there is now is an error."""
        message = self.reply()
        assert message.has_error()
        return message.error.reason or ""

    def answer(self) -> ConfigRecord:
        """What the app found out about its process, from the reply's objects."""
        from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
        from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

        message = self.reply()
        tree = self.store.get_object_tree(message.metadata.message_id)
        contents = {node.object_id: self.store.get(node.object_id) or b"" for node in iterate_object_tree(tree)}
        inflated = inflate_object_from_contents(message.metadata.message_id, contents)
        assert isinstance(inflated, Message)
        answer = inflated.content["answer"]
        assert isinstance(answer, ConfigRecord)
        return answer

    def app_pid(self) -> int:
        """The process in which the app runs, once it runs."""
        path = self.marks / "pid"
        wait_until(lambda: path.exists() and path.read_text() != "")
        return int(path.read_text())


def wait_until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def gone(pid: int) -> bool:
    """Whether a process has ended; a zombie, which only its parent can remove, has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


@contextlib.contextmanager
def parent(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A template process with Flower imported, and `wave` (by default: PyTorch), by which the app sees it."""
    modules = ("flwr.supernode.cli.flwr_clientapp", "httpcore", "wave")
    command = template_command(path) + [word for name in modules for word in ("--import", name)]
    environment = os.environ | {"STRAY": "of the parent", "FLWR_TELEMETRY_ENABLED": "0"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    try:
        wait_until(path.exists)
        yield process
    finally:
        process.kill()
        process.wait()
