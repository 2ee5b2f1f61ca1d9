"""Run directories made by hand, and the report of one after the checks that every report must pass."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, cast

from server.report.canvas import VARIABLES
from server.report.study import StudyResults
from server.report.verdict import answer, condition, verdict
from server.report.write import write_report
from server.results.history import History, Row
from server.results.run_directory import RunDirectory
from server.results.summary import FinishedRun, compare, run_summary

N_TEST = {"a": 10, "b": 20, "c": 40}
Table = Mapping[str, Sequence[float]]
TEST: Table = {"local": (0.5, 0.5, 0.5), "fedavg": (0.6, 0.6, 0.6), "apple": (0.7, 0.5, 0.4)}
VALIDATION = {"local": 0.5, "fedavg": 0.7, "apple": 0.8}
SIX = (0.60, 0.62, 0.58, 0.61, 0.59, 0.60)
BETTER = tuple(v + 0.2 for v in SIX)


def rows_of(
    strategy: str,
    seed: int,
    test: Sequence[float],
    validation: float | None,
    counts: Mapping[str, int],
    rounds: int,
) -> Iterator[Row]:
    """Rounds in which nothing changes; a ``nan`` accuracy is one that the silo withheld."""
    for server_round in range(1, rounds + 1):
        for (name, n), value in zip(counts.items(), test, strict=True):
            for snapshot in ("received", "personal"):
                yield Row(
                    strategy, seed, server_round, name, "test", snapshot, "accuracy", value, n
                )
                if validation is not None and not math.isnan(value):
                    yield Row(
                        strategy,
                        seed,
                        server_round,
                        name,
                        "val",
                        snapshot,
                        "accuracy",
                        validation,
                        8,
                    )
        for metric, value in (("round_seconds", 2.0), ("bytes_down", 3e6), ("bytes_up", 1.2e6)):
            yield Row(strategy, seed, server_round, "", "", "", metric, value, None)


def make_run(
    path: Path,
    test: Mapping[str, Sequence[float] | Sequence[Sequence[float]]] = TEST,
    *,
    counts: Mapping[str, int] = N_TEST,
    validation: Mapping[str, float] | None = VALIDATION,
    seeds: Sequence[int] = (42,),
    config: Mapping[str, Any] | None = None,
    finished: bool = True,
    rounds: int = 2,
    away: Mapping[str, int] | None = None,
) -> Path:
    """A run directory as the round loop leaves it. ``test``: accuracies per silo, for several seeds a list of those.

    ``away``: silo -> the last round that it took part in.
    """
    last = away or {}
    listed = ",".join(map(str, seeds))
    plain: dict[str, Any] = {
        "strategy": ",".join(test),
        "rounds": rounds,
        "seed": listed,
        "silos": len(counts),
    }
    with RunDirectory.open(path, {**plain, **(config or {})}, resume=False) as directory:
        pass
    history = History(directory.history)
    runs = []
    for strategy, values in test.items():
        for k, seed in enumerate(seeds):
            each = cast(Sequence[float], values if len(seeds) == 1 else values[k])
            chosen = None if validation is None else validation[strategy]
            history.add(
                r
                for r in rows_of(strategy, seed, each, chosen, counts, rounds)
                if r.round <= last.get(r.silo, rounds)
            )
            cards = {n: {"n_train": 5 * c, "n_test": c} for n, c in counts.items()}
            totals = {"down": 6_000_000, "up": 2_400_000}
            seconds = {"total": 150.0, "train": 90.0, "communicate": 55.0, "aggregate": 5.0}
            run = FinishedRun(
                strategy=strategy,
                seed=seed,
                rounds=rounds,
                silos=cards,
                total_bytes=totals,
                seconds=seconds,
            )
            runs.append(run_summary(history, run))
    if finished:
        directory.write_json("summary.json", {"runs": compare(runs)})
    return path


class Document(HTMLParser):
    """Tags that do not match, ids given twice, references to anything outside the page, and the visible text."""

    EMPTY = ("meta", "br", "link", "img", "hr", "input")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.ids: list[str] = []
        self.outside: list[str] = []
        self.links: list[str] = []
        self.tags: set[str] = set()
        self.text = ""
        self.feed(text)
        self.wrong += self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in self.EMPTY:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href", "srcset", "action"):
                (self.links if (value or "").startswith("#") else self.outside).append(
                    value or ""
                )

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.EMPTY:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(f"/{tag}")

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data


def changed(study: StudyResults, change: Callable[[dict[str, Any]], object]) -> StudyResults:
    """The study with its summary changed."""
    file = study.path / "summary.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    return StudyResults(study.path)


def planted(path: Path, local: Any, apple: Any, n: int = 200, **options: Any) -> StudyResults:
    """A study of both, by hospital, or by seed and hospital; validation data choose APPLE."""
    each = local[0] if isinstance(local[0], tuple) else local
    counts = {f"h{k}": n for k in range(1, 1 + len(each))}
    test, validation = {"local": local, "apple": apple}, {"local": 0.5, "apple": 0.8}
    return StudyResults(make_run(path, test, counts=counts, validation=validation, **options))


def plain(text: str) -> str:
    return re.sub(r"<[^>]+>", "", unescape(text)).replace("\u202f", " ")


def said(study: StudyResults) -> str:
    """The answer of a study."""
    found = answer(study)
    assert found is not None
    return plain(found.sentence)


def conditions(study: StudyResults) -> str:
    """The conditions of APPLE's gain over training alone."""
    return condition(verdict(study, "apple", "local"))


def checked(path: Path) -> Document:
    """The report of a run, after the checks that every report must pass."""
    html = write_report(path).read_text(encoding="utf-8")
    document = Document(html)
    assert document.wrong == []
    assert len(set(document.ids)) == len(document.ids)
    assert (
        document.outside == []
        and "http://" not in html.replace("http://www.w3.org", "")
        and "https://" not in html
    )
    assert {link[1:] for link in document.links} <= set(document.ids)
    assert "script" not in document.tags
    assert not re.search("|".join(VARIABLES), html.partition("</style>")[2]), (
        "a colour that does not follow the scheme"
    )
    text = re.sub(r"\s+", " ", document.text)
    assert not re.search(r"\bnan\b|\bNone\b|Traceback", text.partition("All settings")[0])
    document.text = text
    return document
