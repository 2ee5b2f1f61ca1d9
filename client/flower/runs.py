"""What a SuperLink does with runs, for the control room (`server/deploy/room/queue.py`), which joins in four calls."""

from collections.abc import Callable
from typing import Any

from .internals import internal

REFUSED_CALL = 15  # Flower's number of a run's configuration that is not valid


class RunCalls:
    """Flower's calls of runs: those that start, list and stop them, and a SuperExec's for the next task.

    ``start`` gets a request, its account and a function that starts the run; ``name_all`` an answer of ListRuns, and
    whether it is the last page; ``discard`` returns whether the run of a number was interrupted and is now dropped;
    ``tasks`` returns those that may begin, the first first; ``began`` gets the number of a run whose task was taken.
    """

    def __init__(self, state: Any) -> None:
        self.state = state
        self.begin = internal("control_handlers").start_run

    def wrap(
        self,
        handlers: Any,
        start: Callable[[Any, Any, Callable[[], Any]], Any],
        name_all: Callable[[Any, bool], None],
        discard: Callable[[int], bool],
        tasks: Callable[[], list[Any]],
        began: Callable[[int], None],
    ) -> None:
        """Have these functions take part in the calls. ``handlers``: those of the Runtime API."""
        control, acquire = internal("control_handlers"), handlers.acquire_task
        every, end = control.list_runs, control.stop_run

        def start_run(request: Any, account: Any, *rest: Any, **more: Any) -> Any:
            return start(request, account, lambda: self.begin(request, account, *rest, **more))

        def list_runs(request: Any, account: Any, state: Any) -> Any:
            tasks()  # what has ended is noted first
            answer = every(request, account, state)
            name_all(answer, len(answer.run_dict) < request.limit)
            return answer

        def stop_run(request: Any, account: Any, state: Any) -> Any:
            if discard(request.run_id):
                return internal("control_pb2").StopRunResponse(success=True)
            return end(request, account, state)

        def acquire_task(request: Any, state: Any) -> Any:
            answer = acquire(request, NextTasks(state, tasks()))
            if answer.HasField("task"):
                began(answer.task.run_id)
            return answer

        control.start_run, control.list_runs = start_run, list_runs
        control.stop_run = stop_run
        handlers.acquire_task = acquire_task

    def repeat(self, content: bytes, app: bytes, account: str, *, resume: bool) -> int:
        """Start a run again by the request that started it; return its number."""
        request = internal("control_pb2").StartRunRequest.FromString(content)
        request.fab.content = app
        if resume:
            changed = internal("user_config_to_proto")({"resume": True})
            request.override_config["resume"].CopyFrom(changed["resume"])
        of = internal("AccountInfo")(flwr_aid=account, account_name="")
        return int(self.begin(request, of, self.state, None).run_id)

    def runs(self, numbers: list[int]) -> dict[int, Any]:
        """Return those of these runs that the SuperLink has, by their numbers."""
        return {run.run_id: run for run in self.state.get_run_info(run_ids=numbers)}

    def add_lost(self, answer: Any, number: int, content: bytes) -> None:
        """Add a run to an answer of ListRuns by the request that started it, unless the SuperLink has the run."""
        if not self.runs([number]):
            request = internal("control_pb2").StartRunRequest.FromString(content)
            run = answer.run_dict[number]
            run.run_id = number
            run.status.status, run.status.sub_status = "finished", "failed"
            run.override_config.MergeFrom(request.override_config)

    def pending(self, number: int) -> list[Any]:
        """Return the task of a run that has not begun, if it has one."""
        run = self.runs([number])[number]
        tasks = self.state.get_tasks(task_ids=[run.primary_task_id], statuses=["pending"])
        return [*tasks]

    def stop(self, number: int) -> None:
        self.state.stop_run(number)


class NextTasks:
    """Flower's state, of whose tasks its handler sees these only; it claims the first."""

    def __init__(self, state: Any, tasks: list[Any]) -> None:
        self.state, self.tasks = state, tasks

    def __getattr__(self, name: str) -> Any:
        return getattr(self.state, name)

    def get_tasks(self, **filters: Any) -> list[Any]:
        return self.tasks


def without_app(request: Any) -> bytes:
    """Return a request to start a run as bytes, without its app."""
    bare = type(request)()
    bare.CopyFrom(request)
    bare.fab.content = b""
    content: bytes = bare.SerializeToString()
    return content


def settings_of_run(run: Any) -> dict[str, Any]:
    """Return the settings of a run, or of a request to start one."""
    return dict(internal("serde").user_config_from_proto(run.override_config))


def note(text: str) -> Any:
    """Return an answer to a request to start a run that only says something."""
    return internal("control_pb2").StartRunResponse(note=text)


def refusal(line: str) -> Exception:
    """Return Flower's error that says a line to the caller."""
    error: Exception = internal("FlowerError")(REFUSED_CALL, line, line)
    return error
