"""The queue of a federation's runs, inside its SuperLink: their names, their order, and what goes on after a restart.

A *run* is what `silofl run` begins: a Flower run for each method and seed, its members, one after the other. Flower's
SuperExec asks for the next task; it gets that of a run whose turn it is. A request to start a run says the run's name
in the field `user_prompt`, which Flower reads for agents only; answers say it in `account_name` (OWNER/NAME), and what
a run waits for in its status's details.

The book of the runs is a file beside the requests that started them, so both survive the SuperLink, which keeps its
runs in memory. A run whose SuperLink or ServerApp died is *interrupted*: it goes on from its checkpoint when an
operator asks for that (`silofl up --resume`), or by itself with SILOFL_RESUME=1.

Environment:
    SILOFL_QUEUE   folder of the book (default: in Flower's folder)
    SILOFL_RUNS    runs at a time (1)
    SILOFL_RESUME  1: interrupted runs go on by themselves
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from client.flower.runs import RunCalls, note, refusal, settings_of_run, without_app
from client.protocol.launch import flower_home
from client.protocol.run_settings import is_secure
from partitions.common.errors import DataError
from partitions.common.files import make_folder, write_atomically
from partitions.common.names import SILO
from partitions.common.parsed import Frozen, parse_values, shorten

FOLDER, LIMIT, RESUME = "SILOFL_QUEUE", "SILOFL_RUNS", "SILOFL_RESUME"
NO_HEARTBEAT = (
    "No heartbeat received from the task"  # Flower's details of a run whose ServerApp died
)
UNTRAINED = ("evaluate", "survey")  # methods without rounds: they begin again
WAITING, RUNNING, INTERRUPTED, ENDED = "waiting", "running", "interrupted", "ended"
MOST_TRIES = 3  # how often a run whose ServerApp died goes on by itself
MOST_KEPT = 1000  # runs in the book; the oldest that ended go first
SAME = "call with the silofl of the server's version"
OWNER = re.compile(r"[\w.@+-]{1,64}")


class QueuedRun(Frozen):
    """A run in the book. ``members``: numbers of its Flower runs; ``done``: how many of them are complete;
    ``app``: SHA-256 of its app."""

    owner: str
    account: str
    out: str
    app: str
    trains: bool
    now: bool = False
    masked: bool = False
    state: str = WAITING
    members: tuple[int, ...] = ()
    done: int = 0
    tries: int = 0


class QueueBook(Frozen):
    """The content of the book's file: the runs, in their order."""

    runs: dict[str, QueuedRun]


class RunWords(Frozen):
    """What a request says of its run; without an app, of the queue. ``of``: the name of the run that it is part of."""

    model_config = ConfigDict(extra="ignore")

    name: str = ""
    method: str = ""
    owner: str = ""
    of: str = ""
    now: bool = False
    resume: bool = False
    limit: Annotated[int, Field(ge=1)] | None = None


@dataclass
class Queue:
    """The runs of one SuperLink. ``folder``: of the book; ``limit``: runs at a time. Raises DataError."""

    folder: Path
    limit: int = 1
    resumes: bool = False

    def __post_init__(self) -> None:
        self.book = self.folder / "book.json"
        self.runs: dict[str, QueuedRun] = {}
        self.lock = threading.RLock()
        self.calls: RunCalls
        make_folder(self.folder, 0o700)
        if self.book.exists():
            mend = "without it the queue is empty: move it away"
            self.runs = parse_values(QueueBook, self.book.read_bytes(), self.book, mend).runs

    @classmethod
    def from_environment(cls, variables: Mapping[str, str] = os.environ) -> Queue:
        """Return the queue that a SuperLink's environment describes."""
        folder = variables.get(FOLDER) or flower_home() / "queue"
        limit = int(variables.get(LIMIT) or 1)
        return cls(Path(folder), limit, resumes=variables.get(RESUME) == "1")

    def attach(self, state: Any, handlers: Any) -> None:
        """Take part in the SuperLink's calls, and put the runs of the book back into its queue.

        ``handlers``: those of the Runtime API.
        """
        self.calls = RunCalls(state)
        self.calls.wrap(
            handlers, self.start, self.name_all, self.discard, self.next_tasks, self.began
        )
        with self.lock:
            for name, entry in [*self.runs.items()]:
                if entry.state == WAITING:
                    self.repeat(name)
                elif entry.state == RUNNING and self.interrupt(name) and self.resumes:
                    self.repeat(name, resume=True)

    # --- calls ---

    def start(self, request: Any, account: Any, begin: Callable[[], Any]) -> Any:
        """Start a member of a run, or change the queue by a request without an app. Raises Flower's error."""
        try:
            text = (request.user_prompt or "{}").encode()
            words = parse_values(RunWords, text, "what the request says of its run", SAME)
        except DataError as error:
            raise refusal(str(error)) from None
        request.user_prompt = ""
        if not (request.fab.content or request.fab.hash_str or request.app_spec):
            return self.change(words)
        values = settings_of_run(request)
        with self.lock:
            self.follow()
            name = words.of
            if name not in self.runs:
                name = self.new_name(words.name, words.method or str(values.get("strategy")))
            elif self.runs[name].state == ENDED:
                raise refusal(f"run {name} has ended")
            answer = begin()
            if not answer.run_id:
                return answer
            out = str(values.get("out", ""))
            for other, entry in [*self.runs.items()]:  # it goes on by hand
                if entry.state == INTERRUPTED and entry.out == out and other != name:
                    self.end(other)
            before = self.runs.get(name) or QueuedRun(
                owner=owner_of(words, account),
                account=account.flwr_aid,
                out=out,
                app=hashlib.sha256(request.fab.content).hexdigest(),
                trains=values.get("strategy") not in UNTRAINED,
                now=words.now,
                masked=is_secure(values),
            )
            self.runs[name] = before.model_copy(
                update={"members": (*before.members, answer.run_id)}
            )
            self.keep(name, len(before.members), request)
            self.save()
        answer.note = name
        return answer

    def change(self, words: RunWords) -> Any:
        """Set the limit, resume interrupted runs if asked to, and answer with the names of those that are left."""
        with self.lock:
            self.follow()
            self.limit = words.limit or self.limit
            names = [n for n, entry in self.runs.items() if entry.state == INTERRUPTED]
            if words.resume:
                for name in names:
                    self.repeat(name, resume=True)
            return note(" ".join(names))

    def name_all(self, answer: Any, last: bool) -> None:
        """Write the runs' names, and what they wait for, into an answer of ListRuns.

        ``last``: the page to which interrupted runs are added that the SuperLink no longer has.
        """
        with self.lock:
            runs, begin = {**self.runs}, self.to_begin()
            lost = {n: e for n, e in runs.items() if last and e.state == INTERRUPTED}
            for interrupted, entry in lost.items():
                content = self.file(interrupted, entry.done).read_bytes()
                self.calls.add_lost(answer, entry.members[entry.done], content)
        names = {run: name for name, entry in runs.items() for run in entry.members}
        waiting = [n for n, e in runs.items() if e.state == WAITING and n not in begin]
        for run_id, run in answer.run_dict.items():
            if not (name := names.get(run_id)):
                continue
            entry = runs[name]
            run.account_name = f"{entry.owner}/{name}"
            if entry.state == INTERRUPTED and run.status.sub_status != "completed":
                run.status.details = INTERRUPTED
            elif run.status.status != "finished":
                place = f"place {waiting.index(name) + 1}" if name in waiting else ""
                run.status.details = place

    def discard(self, run: int) -> bool:
        """Drop the interrupted run that a Flower run is a member of; return whether there is one."""
        with self.lock:
            self.follow()
            for name, entry in self.runs.items():
                if entry.state == INTERRUPTED and run in entry.members:
                    self.drop(name)
                    return True
        return False

    # --- order ---

    def follow(self) -> None:
        """Note what has ended since the last look; what follows on a member that failed is stopped."""
        for name in [n for n, e in self.runs.items() if e.state in (WAITING, RUNNING)]:
            members = self.runs[name].members
            runs = self.calls.runs([*members])
            while (done := self.runs[name].done) < len(members):
                status = runs[members[done]].status
                if status.status != "finished":
                    break
                if status.sub_status != "completed":
                    self._failed(name, status)
                    break
                self.set(name, done=done + 1)
            else:
                self.end(name)

    def _failed(self, name: str, status: Any) -> None:
        entry = self.runs[name]
        if status.details == NO_HEARTBEAT and self.interrupt(name):
            if self.resumes and entry.tries < MOST_TRIES:
                self.set(name, tries=entry.tries + 1)
                self.repeat(name, resume=True)
            return
        self.drop(name)

    def drop(self, name: str) -> None:
        """End a run before its end: the members that it has left are stopped."""
        entry = self.runs[name]
        for run in entry.members[entry.done + 1 :]:
            self.calls.stop(run)
        self.end(name)

    def next_tasks(self) -> list[Any]:
        """Return the tasks that may begin, the first in the queue first."""
        with self.lock:
            self.follow()
            begin, tasks = self.to_begin(), list[Any]()
            for name, entry in self.runs.items():
                if entry.state == RUNNING or name in begin:
                    tasks += self.calls.pending(entry.members[entry.done])
            return tasks

    def to_begin(self) -> list[str]:
        """Return the waiting runs that begin with the SuperExec's next question, the first in the queue first."""
        on = [entry for entry in self.runs.values() if entry.state == RUNNING]
        names = list[str]()
        for name, entry in self.runs.items():
            # A silo keeps the masks of one run
            free = not (entry.masked and any(other.masked for other in on))
            if entry.state == WAITING and free and (entry.now or len(on) < self.limit):
                on.append(entry)
                names.append(name)
        return names

    def began(self, run: int) -> None:
        """Note that a Flower run has begun."""
        with self.lock:
            for name in [n for n, entry in self.runs.items() if run in entry.members]:
                self.set(name, state=RUNNING)

    def interrupt(self, name: str) -> bool:
        """Note that a run was interrupted; return whether it can go on: its folder is known."""
        if not self.runs[name].out:
            self.end(name)
            return False
        self.set(name, state=INTERRUPTED)
        return True

    def repeat(self, name: str, *, resume: bool = False) -> None:
        """Put what is left of a run back into the queue, at its place."""
        entry = self.runs[name]
        members = [*entry.members]
        before, app = self.calls.runs(members), self.app(entry.app).read_bytes()
        for index in range(entry.done, len(members)):
            run = before.get(members[index])
            if run is None or run.status.status == "finished":
                members[index] = self.calls.repeat(
                    self.file(name, index).read_bytes(),
                    app,
                    entry.account,
                    resume=resume and Path(entry.out, "config.toml").exists() and entry.trains,
                )
        self.set(name, state=WAITING, members=tuple(members))

    # --- names ---

    def new_name(self, wanted: str, method: str) -> str:
        """Return a run's name: the wanted one, or its method and the date. Raises Flower's error for one in use.

        The name of a run that ended is free once the SuperLink no longer lists the run.
        """
        if wanted:
            if not SILO.fullmatch(wanted):
                raise refusal(
                    f"--name {shorten(wanted)}: use 1 to 63 lower-case letters, digits and hyphens"
                )
            entry = self.runs.get(wanted)
            if entry and (entry.state != ENDED or self.calls.runs([*entry.members])):
                raise refusal(f"--name {wanted}: there is a run of that name; choose another")
            self.runs.pop(wanted, None)
            return wanted
        method = method if SILO.fullmatch(method) else "run"
        name = f"{method[:40]}-{time.strftime('%Y-%m-%d')}"
        numbers = (f"{name}-{i}" for i in range(2, MOST_KEPT + 2))
        return next(n for n in (name, *numbers) if n not in self.runs)

    # --- the book ---

    def set(self, name: str, **changes: Any) -> None:
        """Change an entry, and save the book."""
        entry = self.runs[name].model_copy(update=changes)
        if entry != self.runs[name]:
            self.runs[name] = entry
            self.save()

    def end(self, name: str) -> None:
        """Note that a run has ended; only its name is kept."""
        self.set(name, state=ENDED)
        ended = [n for n, entry in self.runs.items() if entry.state == ENDED]
        for old in ended[: max(0, len(self.runs) - MOST_KEPT)]:
            del self.runs[old]
        left = {n: entry for n, entry in self.runs.items() if entry.state != ENDED}
        files = {self.app(entry.app) for entry in left.values()}
        for name, entry in left.items():
            files |= {self.file(name, i) for i in range(len(entry.members))}
        for file in {*self.folder.glob("*.fab"), *self.folder.glob("*.request")} - files:
            file.unlink()

    def save(self) -> None:
        write_atomically(
            self.book, QueueBook(runs=self.runs).model_dump_json() + "\n", mode=0o600
        )

    def keep(self, name: str, index: int, request: Any) -> None:
        """Keep what started a member, the app apart from it."""
        if not (app := self.app(self.runs[name].app)).exists():
            write_atomically(app, request.fab.content, mode=0o600)
        write_atomically(self.file(name, index), without_app(request), mode=0o600)

    def file(self, name: str, index: int) -> Path:
        return self.folder / f"{name}.{index}.request"

    def app(self, digest: str) -> Path:
        return self.folder / f"{digest}.fab"


def owner_of(words: RunWords, account: Any) -> str:
    """Return who a request says that its run is of, or the account."""
    return words.owner if OWNER.fullmatch(words.owner) else str(account.account_name)
