"""Workers without processes, and what a study leaves."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

from tiny import history_without_seconds

from server.simulation.workers import Ends, Job, work


def left(run: Path) -> dict[str, Any]:
    """All that a study leaves but seconds: rows, summary, settings, and which files there are."""
    history = history_without_seconds(run)
    summary = [
        {k: v for k, v in r.items() if k != "seconds"}
        for r in read_json(run / "summary.json")["runs"]
    ]
    files = {str(f.relative_to(run)) for f in run.rglob("*") if f.is_file()}
    same = {name: (run / name).read_text() for name in ("config.toml", "manifest.json")}
    return {"history": history, "summary": summary, "files": files, **same}


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def inline(
    jobs: Mapping[str, Job], *, stop: Callable[[str], object] = lambda key: None
) -> Generator[Ends, None, None]:
    """An engine without processes: the study backwards, each run as a worker does it, with a look in between."""
    for key, job in reversed(list(jobs.items())):
        stop(key)
        code = work(str(job.directory.path), job.run.run_key, job.run.common.resume)
        yield {}
        yield {key: code}
