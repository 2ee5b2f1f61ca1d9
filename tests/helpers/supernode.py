"""A SuperNode for tests of what it does with a message, without a SuperLink.

`NodeSilo` is a SuperNode's part without the server: a test gives it a message and an app, has it answered as our
SuperNode does, and looks at the reply. The template process imports Flower only, so it is ready in about a second.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from apps import project
from flwr.app import ConfigRecord, Context, Message, Metadata, RecordDict
from flwr.app.message import make_message
from flwr.cli.build import build_fab_from_disk
from flwr.common.config import get_fab_config, get_metadata_from_config
from flwr.supercore.constant import TaskType
from flwr.supercore.fab import Fab
from flwr.supercore.run import Run

from client.flower.loop import Received
from client.protocol.launch import template_command
from client.site.runtime.answering import answer_message
from client.site.runtime.worker import Workers

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
        if behaviour == "lies":  # to its SuperNode, about how it ended
            for number in os.listdir("/proc/self/fd"):
                link = pathlib.Path("/proc/self/fd", number)
                if link.is_symlink() and "socket" in os.readlink(link):
                    os.write(int(number), b"X-9999")
            time.sleep(60)
        if behaviour == "loosens":
            pathlib.Path(os.environ["SILOFL_POLICY"]).write_text("peers = true")
        if behaviour == "raises":
            raise ValueError("no such column")
        if behaviour == "hangs":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True:
                time.sleep(60)
        if behaviour == "waits":
            time.sleep(3)
        seen = context.state.config_records.setdefault("seen", ConfigRecord({"messages": 0}))
        seen["messages"] += 1
        app.served = getattr(app, "served", 0) + 1
        answer = {"version": VERSION, "pid": os.getpid(), "cwd": os.getcwd(), "argv": sys.argv[0],
                 "secret": os.environ.get("SECRET", ""), "stray": os.environ.get("STRAY", ""),
                 "warm": "wave" in sys.modules or "torch" in sys.modules,
                 "served": app.served, "messages": seen["messages"], "terms": context.node_config["terms"]}
        return Message(RecordDict({"answer": ConfigRecord(answer)}), reply_to=message)
"""


class NodeSilo:
    """A SuperNode's messages, its app's process, and the environment that it has."""

    def __init__(self, folder: Path, template: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waiting: list[Received] = []
        self.replies: list[Message] = []
        self.workers = Workers()
        self.folder, self.marks = folder, folder / "marks"
        self.marks.mkdir()
        (folder / "work").mkdir()
        monkeypatch.chdir(folder / "work")
        self.patch = monkeypatch
        self.set(
            FLWR_HOME=str(folder / "flower"),
            MARKS=str(self.marks),
            SECRET="of this silo",
            SILOFL_WARM_SOCKET=str(template),
        )
        self.messages = 0
        self.node_config: dict[str, Any] = {"name": "north", "state-dir": str(folder / "state")}
        self.log = folder / "state/audit"

    def set(self, **environment: str) -> None:
        for name, value in environment.items():
            self.patch.setenv(name, value)

    def app(self, version: str) -> Fab:
        """An app whose two modules are the same in every version but for one line of the second."""
        folder = self.folder / f"app-{version}"
        folder.mkdir(exist_ok=True)
        (folder / "main.py").write_text(textwrap.dedent(CLIENT))
        (folder / "helper.py").write_text(f"VERSION = {version!r}\n")
        (folder / "pyproject.toml").write_text(project("main:app", "main:app"))
        content = build_fab_from_disk(folder)
        return Fab(hashlib.sha256(content).hexdigest(), content, {})

    def store_message(
        self,
        fab: Fab,
        behaviour: str = "",
        ttl: float = 60.0,
        node_config: dict[str, Any] | None = None,
        run_config: dict[str, Any] | None = None,
        kind: str = "train",
        run_id: int = 0,
        kind_of_task: str = TaskType.CLIENT_APP,
        **named: str,
    ) -> None:
        """Store a message for the app. Each is of a run of its own, if none is named."""
        self.messages += 1
        run_id = run_id or RUN + self.messages
        run = Run.create_empty(run_id)
        run.fab_id, run.fab_version = get_metadata_from_config(get_fab_config(fab.content))
        run.fab_hash, run.series_id = fab.hash_str, run_id
        vars(run).update(named)  # `fab_id`, `fab_version`: the server's word
        run.primary_task_type = kind_of_task
        context = Context(
            run_id,
            NODE,
            node_config or self.node_config,
            RecordDict(),
            run_config or RUN_CONFIG,
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
        content = RecordDict(
            {"config": ConfigRecord({"behaviour": behaviour, "round": 3, "run": "today"})}
        )
        message = make_message(metadata=metadata, content=content)
        metadata.__dict__["_message_id"] = message.object_id
        self.waiting.append(Received(message, run, fab, context))

    def ask(self, fab: Fab, *args: Any, **kwargs: Any) -> None:
        """Store a message, as :meth:`store_message`, and have it answered."""
        self.store_message(fab, *args, **kwargs)
        self.answer_all()

    def answer_all(self) -> None:
        while self.waiting:
            task = self.waiting.pop(0)
            bare = make_message(task.message.metadata, RecordDict())
            self.replies.append(answer_message(self.workers, bare, lambda task=task: task))  # type: ignore[misc]

    def reply(self) -> Message:
        """The one reply that there is now, taken."""
        (message,) = self.replies
        self.replies.clear()
        return message

    def reason(self) -> str:
        """Why the one reply that there is now is an error."""
        message = self.reply()
        assert message.has_error()
        return message.error.reason or ""

    def answer(self) -> ConfigRecord:
        """What the app found out about its process."""
        answer = self.reply().content["answer"]
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
    modules = ("flwr.clientapp", "flwr.clientapp.utils", "flwr.common.serde", "wave")
    command = template_command(path) + [word for name in modules for word in ("--import", name)]
    environment = os.environ | {"STRAY": "of the parent", "FLWR_TELEMETRY_ENABLED": "0"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    try:
        wait_until(path.exists)
        yield process
    finally:
        process.kill()
        process.wait()
