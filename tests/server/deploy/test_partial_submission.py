"""A study whose last member is not submitted: the others do not train on."""

from __future__ import annotations

from typing import Any

import pytest

from partitions.common.errors import RunFailedError
from server.deploy.submit import submit


class Server:
    """A Control API that loses the third member's request, and those to stop a run if it is ``silent``."""

    def __init__(self, *, silent: bool) -> None:
        self.silent, self.started, self.stopped = silent, list[str](), list[int]()

    def start(self, app: bytes, settings: Any, words: Any) -> tuple[int, str]:
        if len(self.started) == 2:
            raise ConnectionError("no answer from the server: timed out")
        self.started.append(settings["strategy"])
        return len(self.started), "sepsis"

    def stop(self, number: int) -> bool:
        if self.silent:
            raise ConnectionError("no answer from the server: timed out")
        self.stopped.append(number)
        return True


@pytest.mark.parametrize(
    ("silent", "stopped", "said"),
    [
        (False, [2, 1], "^the run was not submitted: no answer from the server: timed out$"),
        (True, [], "only 2 of the 3 parts of run sepsis .* `silofl stop sepsis` ends them"),
    ],
)
def test_what_was_submitted_is_stopped(silent, stopped, said):
    server: Any = Server(silent=silent)
    members = [{"strategy": method} for method in ("local", "fedavg", "fedala")]
    with pytest.raises(RunFailedError, match=said):
        submit(server, b"", members, {})
    assert server.stopped == stopped
