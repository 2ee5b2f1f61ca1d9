"""Text that comes from a silo is one printable line of at most 300 characters wherever it is shown or stored, and no
spreadsheet takes a cell of the history for a formula."""

from __future__ import annotations

import csv
import json
from html.parser import HTMLParser

import pytest
from flwr.app import ConfigRecord, Error, Message
from flwr.common.constant import ErrorCode
from tiny import federate, round_of

from partitions.common.names import guard_formula, unguard_formula
from server.deploy.following import RunFollower
from server.report.write import write_report
from server.results.history import HEADER, History, Row
from server.results.summary import write_summary
from strategies.base.transport.reporting import LONGEST, printable, reason_of

NASTY = (
    "\x1b]0;owned\x07\x1b[2J\r\nround 9/9: all well\n\u202e<img src=x onerror=alert(1)> =cmd|' /C calc'!A0 "
    + "x" * 10**5
)


def nasty(kind, *rounds, code=1):
    """For ``prepare``: c fails with a nasty reason."""

    def after(silo, message, reply):
        if (
            silo == "c"
            and message.metadata.message_type == kind
            and round_of(message) in rounds
        ):
            return Message(Error(code, NASTY), reply_to=message)
        return reply

    return lambda grid: setattr(grid, "after", after)


def harmless(text):
    return text.isprintable() and 0 < len(text) <= LONGEST


class Page(HTMLParser):
    """The tags of a page, and its text."""

    def __init__(self, text):
        super().__init__()
        self.tags: set[str] = set()
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)

    def handle_data(self, data):
        self.text += data


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("two\nlines\tand\r\n more ", "two lines and more"),
        ("\x1b[31mred\x07", r"\x1b[31mred\x07"),
        ("left\u202eright\u200b", r"left\u202eright\u200b"),
        ("half \udc80", r"half \udc80"),
        ("Zürich, 東京", "Zürich, 東京"),
        ("x" * 301, "x" * 297 + "..."),
        ("\x00" * 1000, r"\x00" * 74 + "\\..."),
        ("", ""),
        (7, "7"),
    ],
)
def test_printable(text, shown):
    assert printable(text) == shown and len(shown) <= LONGEST
    assert printable(printable(text)) == shown


def test_a_reason_is_printable():
    assert harmless(reason_of(NASTY)) and harmless(reason_of(f"<class 'a.B'>:<'{NASTY}'>"))
    assert reason_of("\n") == reason_of("\x85") == "failed without a reason"


@pytest.mark.parametrize(
    ("kind", "when"), [("query", (0,)), ("train", (1, 2)), ("evaluate", (3,))]
)
def test_a_nasty_reason_everywhere(three, tmp_path, kind, when, caplog, capsys):
    """In the log, progress.jsonl, what `silofl run` prints of it, summary, history, checkpoint and report."""
    caplog.set_level("DEBUG", logger="flwr")
    run = federate(
        three,
        strategy="fedavg",
        rounds=2,
        directory=tmp_path / "run",
        prepare=nasty(kind, *when),
    )
    write_summary(run.federation.directory, run.federation.history, run.federation.finish_run())  # type: ignore[arg-type]
    check_files(run, tmp_path / "run", capsys)
    lines = [record.getMessage() for record in caplog.records]
    named = [line for line in lines if "owned" in line]
    assert (
        named
        and max(map(len, named)) < 2 * LONGEST
        and all(line.isprintable() for line in lines)
    )


def check_files(run, directory, capsys):
    lines = (directory / "progress.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    told = [e["message"] for e in events if "message" in e] + [
        r for e in events for r in e.get("rejected", {}).values()
    ]
    told += list(run.strategy.rejected.values()) + list(
        run.federation.registration.left_out.values()
    )
    assert any("owned" in text for text in told) and all(map(harmless, told))
    capsys.readouterr()
    progress = RunFollower(directory / "progress.jsonl")
    progress.tail.position = 0
    progress.read()
    assert all(line.isprintable() for line in capsys.readouterr().err.splitlines())
    for file in directory.rglob("*"):
        assert file.is_dir() or (
            b"\x1b]0;owned" not in file.read_bytes()
            and b"x" * (LONGEST + 1) not in file.read_bytes()
        )
    page = Page(write_report(directory).read_text())
    assert "img" not in page.tags


def test_a_silo_that_says_it_is_not_reachable(three, caplog):
    """Under a code of the SuperLink's own, for which it is asked again; then it gives its card."""
    calls: list[str] = []

    def after(silo, message, reply):
        if silo == "c" and message.metadata.message_type == "query" and not calls:
            calls.append(silo)
            return Message(Error(ErrorCode.NODE_UNAVAILABLE, NASTY), reply_to=message)
        return reply

    def prepare(grid):
        grid.after = after

    federate(three, strategy="fedavg", rounds=1, prepare=prepare)
    assert "owned" in caplog.text and all(
        record.getMessage().isprintable() for record in caplog.records
    )


def test_what_replies_hold_is_quoted_harmlessly(three):
    """The names and numbers of a reply stand in the reason for which it is left out."""
    spoilt = {"silo": NASTY, "round": NASTY, "manifest": json.dumps([{"name": NASTY}])}

    for key, value in spoilt.items():

        def after(silo, message, reply, key=key, value=value):
            if silo == "c" and message.metadata.message_type == "train":
                reply.content["config"] = ConfigRecord({**reply.content["config"], key: value})
            return reply

        run = federate(three, strategy="fedavg", rounds=1, evaluate_every=0, after=after)
        assert harmless(run.strategy.rejected["c"]), key


# ---- Spreadsheets ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["=1+1", "+1", "-1", "@SUM(1)", "\t=1", "'=1", "''-1", "'a", "a=1", "", "a,b"]
)
def test_no_cell_is_a_formula(tmp_path, name):
    """And what is read back is what was written."""
    assert guard_formula("\r=1") == "'\r=1" and unguard_formula(guard_formula("\r=1")) == "\r=1"
    row = Row("fedavg", 7, 1, name, "test", "received", "accuracy", -0.5, 3)
    History(tmp_path / "history.csv").add([row])
    with (tmp_path / "history.csv").open(newline="") as file:
        cells = list(csv.reader(file))
    assert cells[0] == HEADER and not cells[1][3].startswith(("=", "+", "-", "@", "\t", "\r"))
    assert cells[1][7] == "-0.5"  # a number is one
    assert History(tmp_path / "history.csv").rows == [row]
