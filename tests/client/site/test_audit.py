"""The site's audit log: every way to falsify it is found and named; crashes and full disks do it no harm."""

from __future__ import annotations

import json
import os
import resource
import signal
import textwrap
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from audit_lines import entry
from forks import ended, fork, in_fork
from taken import silofl
from tiny import json_of

from client.protocol import chain
from client.protocol.chain import chain_line, digest
from client.protocol.methods import DEFAULTS
from client.site.trust import audit_page
from client.site.trust.audit import (
    LARGEST_SETTINGS,
    Log,
    log_files,
    settings_by_line,
    verify_log,
)

FIRST = chain.file_name(1, "audit")


@pytest.fixture
def log(tmp_path):
    """Six lines."""
    for number in range(1, 7):
        Log(tmp_path / "audit").append(entry(number))
    return tmp_path / "audit"


def text_of(log):
    return (log / FIRST).read_text().splitlines()


def write(log, lines, end="\n"):
    (log / FIRST).write_text("\n".join(lines) + end)


def test_a_whole_log(log):
    found = verify_log(log)
    assert (found.faults, found.notes) == ([], [])
    assert [one["line"] for one in found.entries] == [1, 2, 3, 4, 5, 6]
    assert found.entries[0]["previous"] == chain.START
    assert [one["previous"] for one in found.entries[1:]] == [
        one["hash"] for one in found.entries[:-1]
    ]
    assert {p.name: p.stat().st_mode & 0o777 for p in (log, *log.iterdir())} == {
        "audit": 0o700,
        ".lock": 0o600,
        "head.json": 0o600,
        FIRST: 0o600,
    }


# --- the settings of a run --------------------------------------------------------------------------------


SETTINGS = {"batch-size": 64, "learning-rate": 1.0, "strategy": "apple", "resume": False}


def of_run(number, settings=SETTINGS, **changes):
    return (
        entry(number)
        | {"settings": digest(chain.canonical(settings)), "run-config": settings}
        | changes
    )


def test_the_settings_of_a_run_are_kept_once_per_run_and_file(tmp_path, monkeypatch):
    other = SETTINGS | {"batch-size": 7}
    log = Log(tmp_path / "audit")
    for number, settings in enumerate((SETTINGS, SETTINGS, other, SETTINGS, other), 1):
        log.append(of_run(number, settings))
    entries = verify_log(log.folder).entries
    assert [one.get("run-config") for one in entries] == [SETTINGS, None, other, None, None]
    assert [one.get("settings-line") for one in entries] == [None, 1, None, 1, 3]
    assert settings_by_line(entries) == {
        1: SETTINGS,
        2: SETTINGS,
        3: other,
        4: SETTINGS,
        5: other,
    }
    # Each file tells alone, once the ones before it are moved away
    monkeypatch.setattr(chain, "LARGEST", 10)
    log.append(of_run(6))
    log.append(of_run(7) | {"run-id": "8"})
    assert ["run-config" in one for one in verify_log(log.folder).entries][5:] == [True, True]
    assert not verify_log(log.folder).faults


@pytest.mark.parametrize("damage", ["no note", "torn", "odd note"])
def test_settings_are_written_again_where_nothing_tells_that_they_are_there(tmp_path, damage):
    log = Log(tmp_path / "audit")
    log.append(of_run(1))
    if damage == "torn":
        write(log.folder, [text_of(log.folder)[0][:-9]], end="")
    head = {"line": 0, "hash": chain.START} | (
        {"settings": {"lines": 3}} if damage == "odd note" else {}
    )
    (log.folder / "head.json").write_text(json.dumps(head))
    log.append(of_run(2))
    assert (
        "run-config" in verify_log(log.folder).entries[-1] and not verify_log(log.folder).faults
    )


def test_settings_that_were_taken_out_or_changed_are_a_fault(tmp_path):
    """By somebody who makes all hashes anew."""
    for change, names in (
        ({"run-config": {"batch-size": 1}}, {1, 2}),
        ({"run-config": {}}, {2}),
    ):
        log = Log(tmp_path / str(names))
        log.append(of_run(1))
        log.append(of_run(2))
        first, second = (json.loads(line) for line in text_of(log.folder))
        text, own = chain_line({k: v for k, v in (first | change).items() if k != "hash"})
        last, end = chain_line(
            {k: v for k, v in (second | {"previous": own}).items() if k != "hash"}
        )
        write(log.folder, [text.decode(), last.decode()])
        chain.write_whole(
            log.folder / "head.json", json.dumps({"line": 2, "hash": end, "settings": {}})
        )
        faults = verify_log(log.folder).faults
        assert {
            f"line {n}: line 1 does not have the settings of its run" for n in names
        } <= set(faults)


def test_a_log_of_before_settings_were_kept_goes_on(log):
    head = json_of(log / "head.json")
    (log / "head.json").write_text(json.dumps({"line": head["line"], "hash": head["hash"]}))
    Log(log).append(of_run(7))
    Log(log).append(of_run(8))
    found = verify_log(log)
    assert not found.faults and settings_by_line(found.entries) == {7: SETTINGS, 8: SETTINGS}


def test_more_settings_than_the_log_keeps_get_no_reply(tmp_path):
    with pytest.raises(ValueError, match="bytes of settings, and the log keeps at most"):
        Log(tmp_path / "audit").append(of_run(1, {"agreed": "x" * LARGEST_SETTINGS}))
    assert not verify_log(tmp_path / "audit").entries


def test_the_page_shows_the_settings_and_nothing_that_steers_a_terminal(tmp_path, capsys):
    odd = SETTINGS | {"agreed": "\x1b[2J\n"}
    Log(tmp_path / "audit").append(
        of_run(1, odd, run="today\x1b]0;gone\x07\nsecond line", asked="a\x9b")
    )
    assert silofl("audit", tmp_path, "--all-settings") == 0
    out = capsys.readouterr().out
    assert 'batch-size = 64, learning-rate = 1.0, strategy = "apple", resume = false' in out
    assert "today\\x1b]0;gone\\x07\\nsecond line" in out
    assert all(line.isprintable() for line in out.split("\n"))


def flip(position):
    """One bit of a line, so far along it."""

    def changed(line):
        i = int(position * (len(line) - 1))
        return line[:i] + chr(ord(line[i]) ^ 1) + line[i + 1 :]

    return changed


@pytest.mark.parametrize("number", [1, 3, 6])
@pytest.mark.parametrize("position", [0, 0.1, 0.5, 0.9, 1])
def test_a_flipped_line(log, number, position):
    """That line is named, and no other."""
    lines = text_of(log)
    lines[number - 1] = flip(position)(lines[number - 1])
    write(log, lines)
    (fault,) = verify_log(log).faults
    assert fault.startswith(f"{FIRST}, line {number}: changed")


MOVED: dict[str, tuple[Callable[[list[str]], list[str]], list[str]]] = {
    "first gone": (lambda t: t[1:], ["line 1: line 1 is missing before line 2"]),
    "third gone": (lambda t: t[:2] + t[3:], ["line 3: line 3 is missing before line 4"]),
    "three gone": (lambda t: t[:1] + t[4:], ["line 2: lines 2 to 4 are missing before line 5"]),
    "last gone": (lambda t: t[:5], ["head.json: line 6 is missing at the end"]),
    "two last gone": (lambda t: t[:4], ["head.json: lines 5 to 6 are missing at the end"]),
    "moved": (
        lambda t: [t[0], t[2], t[1], *t[3:]],
        [
            "line 2: line 2 is missing before line 3",
            "line 3: line 2 stands behind line 3: moved, or written twice",
        ],
    ),
    "twice": (
        lambda t: [*t[:3], t[1], *t[3:]],
        ["line 4: line 2 stands behind line 3: moved, or written twice"],
    ),
}


@pytest.mark.parametrize("change", MOVED)
def test_lines_that_were_deleted_moved_or_doubled(log, change):
    done, faults = MOVED[change]
    write(log, done(text_of(log)))
    assert [text.removeprefix(f"{FIRST}, ") for text in verify_log(log).faults] == faults
    Log(log).append(entry(7))  # writing on hides nothing
    assert (
        len(verify_log(log).faults) == len(faults) and verify_log(log).entries[-1]["line"] == 7
    )


def test_a_line_that_was_replaced_by_another_whole_one(log):
    """Whoever makes its hash right, too, has to make all that follow anew, and what was kept elsewhere shows it."""
    seen = verify_log(log).entries[-1]["hash"]
    lines = text_of(log)
    false = {k: v for k, v in json.loads(lines[2]).items() if k != "hash"} | {"bytes": 1}
    lines[2] = chain_line(false)[0].decode()
    write(log, lines)
    assert [text.partition(", ")[2] for text in verify_log(log).faults] == [
        "line 4: line 4 does not follow from the line before it: one was replaced"
    ]
    lines[5] = chain_line(
        {k: v for k, v in json.loads(lines[5]).items() if k != "hash"} | {"bytes": 1}
    )[0].decode()
    write(log, lines)
    assert verify_log(log).faults[-1] == "head.json: line 6 is another one than was written"
    assert silofl("audit", log, "--seen", seen) == 2


@pytest.mark.parametrize(("number", "kept"), [(3, 0.5), (6, 0.5), (6, 0.99), (6, 1.0)])
def test_a_truncated_line(log, number, kept):
    """Cut off in the middle of the log, or at its end: there it looks as after a crash, but it had been written."""
    lines = text_of(log)
    lines[number - 1] = lines[number - 1][: int(kept * len(lines[number - 1])) - (kept < 1)]
    write(log, lines, end="\n" if number < 6 else "")
    found = verify_log(log)
    if kept == 1.0:  # only the end of the line is gone: nothing is lost
        assert not found.faults
        return
    (fault,) = found.faults
    assert fault.startswith(f"{FIRST}, line {number}: changed")


def test_a_truncated_last_line_is_not_passed_off_as_torn_by_writing_on(log):
    lines = text_of(log)
    write(log, [*lines[:5], lines[5][:50]], end="")
    Log(log).append(entry(7))
    found = verify_log(log)
    assert [text.partition(", ")[2] for text in found.faults] == [
        "line 7: line 6 is missing before line 7"
    ]


def test_a_deleted_note_of_the_last_line_is_named(log):
    (log / "head.json").unlink()
    assert verify_log(log).faults[0].startswith("head.json: missing or damaged")


@pytest.mark.parametrize("text", ["", "x", "{}", '{"line":1}', "\x00" * 100])
def test_lines_that_are_none(log, text):
    lines = text_of(log)
    write(
        log,
        [
            *lines[:2],
            chain_line(json.loads(text))[0].decode() if text.startswith("{") else text,
            *lines[2:],
        ],
    )
    assert any(f"{FIRST}, line 3: changed" in fault for fault in verify_log(log).faults)


# --- crashes and disks ------------------------------------------------------------------------------------


def dying(log, *, share=None):
    """A fork that is killed as it appends line 7: once this share of it is in the file, or before the note of it."""

    def append():
        whole: Any = os.write
        kill = partial(os.kill, os.getpid(), signal.SIGKILL)
        if share is None:
            chain.write_whole = lambda *_, **__: kill()
        else:
            written: Any = lambda fd, data: (whole(fd, data[: share(len(data))]), kill())  # noqa: E731
            os.write = written
        Log(log).append(entry(7))

    assert in_fork(append) == -signal.SIGKILL


@pytest.mark.parametrize("share", [0, 1, 300, -2])
def test_killed_in_the_middle_of_a_write(log, share):
    """kill -9 once so many bytes are in the file: told, and the chain goes on from the last whole line."""
    dying(log, share=lambda size: share % size)
    torn = share != 0
    found = verify_log(log)
    assert not found.faults and len(found.entries) == 6 and len(found.notes) == torn
    Log(log).append(entry(7))
    Log(log).append(entry(8))
    found = verify_log(log)
    assert not found.faults and [one["line"] for one in found.entries][-2:] == [7, 8]
    if torn:
        assert found.notes == [
            f"{FIRST}, line 7: torn by a crash; its message did not leave, and the next line says so"
        ]


@pytest.mark.parametrize("share", [lambda size: size - 1, None], ids=["its end", "its note"])
def test_killed_behind_the_line(log, share):
    """It counts, as one that was written and whose message then did not go."""
    dying(log, share=share)
    assert not verify_log(log).faults and len(verify_log(log).entries) == 7
    Log(log).append(entry(8))
    found = verify_log(log)
    assert (found.faults, found.notes, found.entries[-1]["line"]) == ([], [], 8)


def test_killed_twice_in_the_middle_of_a_write(log):
    """The line that goes on from a torn one is torn itself, right after it has ended the first."""
    for share in (30, 1):
        dying(log, share=lambda size, share=share: share)
    Log(log).append(entry(7))
    found = verify_log(log)
    assert not found.faults and found.entries[-1]["line"] == 7 and len(found.notes) == 1


@pytest.mark.parametrize("block", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    "text", [b"", b"\n", b"a", b"a\n", b"\n\na", b"one\n\ntwo\nthree", b"one\ntwo\n\n"]
)
def test_a_file_read_from_its_end_has_the_same_lines(tmp_path, monkeypatch, text, block):
    """However the blocks fall on its lines."""
    file = tmp_path / FIRST
    file.write_bytes(text)
    monkeypatch.setattr(chain, "BLOCK", block)
    assert list(chain.last_first(file))[::-1] == [place.text for place in chain.lines([file])]


def test_a_line_that_is_torn_in_a_new_file_follows_the_file_before(log):
    """The newest file holds nothing whole: the last whole line is the one before it."""
    (log / chain.file_name(2, "audit")).write_bytes(b'{"line":7')
    Log(log).append(entry(7))
    found = verify_log(log)
    assert not found.faults and found.entries[-1]["line"] == 7 and len(found.notes) == 1
    assert len(log_files(log)) == 2


def test_a_disk_that_is_full(log):
    """The kernel takes a part of the line and no more: nothing of it stays, and the log goes on when there is room."""
    size = (log / FIRST).stat().st_size

    def append():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100,) * 2)
        with pytest.raises(OSError, match="File too large"):
            Log(log).append(entry(7))

    assert in_fork(append) == 0
    assert (log / FIRST).stat().st_size == size
    assert (verify_log(log).faults, verify_log(log).notes) == ([], [])
    Log(log).append(entry(7))
    assert not verify_log(log).faults and len(verify_log(log).entries) == 7


def test_it_rotates(tmp_path, monkeypatch):
    """The chain goes on over the files; where old ones are kept elsewhere, the first line here has to be said."""
    monkeypatch.setattr(chain, "LARGEST", 2000)
    for number in range(1, 9):
        Log(tmp_path).append(entry(number))
    names = [file.name for file in log_files(tmp_path)]
    assert len(names) > 2 and names == [
        chain.file_name(n + 1, "audit") for n in range(len(names))
    ]
    assert not verify_log(tmp_path).faults and len(verify_log(tmp_path).entries) == 8
    log_files(tmp_path)[0].unlink()
    left = verify_log(tmp_path)
    first = left.entries[0]["line"]
    assert first > 1 and left.faults == [
        f"{names[1]}, line 1: "
        + (f"lines 1 to {first - 1} are" if first > 2 else "line 1 is")
        + f" missing before line {first}"
    ]
    assert not verify_log(tmp_path, first).faults
    log_files(tmp_path)[1].unlink()
    assert len(verify_log(tmp_path, first).faults) == 1


def test_two_that_write_at_once(log):
    def append():
        for _ in range(20):
            Log(log).append(entry(7))

    both = [fork(append), fork(append)]
    assert [ended(one) for one in both] == [0, 0]
    assert not verify_log(log).faults and len(verify_log(log).entries) == 46


def test_a_line_that_is_written_meanwhile_is_no_missing_one(log, monkeypatch):
    """A silo that runs writes a line just when another process has read the files."""

    def read_then_written(files):
        yield from [*lines(files)]
        Log(log).append(entry(7))

    lines = chain.lines
    monkeypatch.setattr(chain, "lines", read_then_written)
    assert not (verdict := verify_log(log)).faults and len(verdict.entries) == 6


# --- the page ---------------------------------------------------------------------------------------------


def test_the_page_shows_settings_that_are_not_the_defaults(tmp_path, capsys):
    """A run has some 260 settings. What is unknown here is no default, and is shown."""
    told = {
        "strategy": "apple",
        "momentum": DEFAULTS["momentum"],
        "batch-size": 7,
        "not-known": 0,
    }
    Log(tmp_path / "audit").append(of_run(1, told))
    assert silofl("audit", tmp_path) == 0
    out = capsys.readouterr().out
    assert (
        'strategy = "apple", batch-size = 7, not-known = 0\n' in out and "momentum" not in out
    )
    assert "1 more settings are silofl's defaults (--all-settings)" in out
    assert silofl("audit", tmp_path, "--all-settings") == 0
    out = capsys.readouterr().out
    assert "momentum = 0.0" in out and "more settings" not in out


def test_a_month_on_a_page(tmp_path, capsys):
    """Per run who, when, how often, what, how many bytes; the data summary is part of the run that asked for it."""
    log = Log(tmp_path / "state/audit")
    summary = [{"name": "summary", "keys": ["name", "n_train"], "bytes": 20, "sha256": "0"}]
    log.append(entry(1, time="2026-10-31T23:59:59Z"))
    log.append(entry(0, run="", sent=summary, bytes=20, asked="query"))
    log.append(entry(1))
    log.append(entry(2, time="2026-11-23T10:00:00Z"))
    error = [
        {
            "name": "error",
            "text": "<class 'a.BError'>:<'no such\ncolumn'>",
            "bytes": 14,
            "sha256": "0",
        }
    ]
    log.append(
        entry(
            1,
            **{"run-id": "8", "run": "", "sent": error, "bytes": 14, "rule": "no allowed-apps"},
        )
    )
    assert silofl("audit", tmp_path / "state") == 0
    out = capsys.readouterr().out
    last = verify_log(log.folder).entries[-1]["hash"]
    assert out == textwrap.dedent(f"""\
        clinic, 2026-11: 2 runs, 4 messages, 190 bytes left

        today (apple; run 7)
          asked by  fl.example.org:9092, 2026-11-22T00:00:00Z to 2026-11-23T10:00:00Z
          with      app {"a" * 64}, settings {"b" * 16}
          let by    allowed-apps: this build is listed
          left      3 messages, 176 bytes, rounds 1 to 2
                        1 x summary: name, n_train, 20 bytes
                        2 x model.model/vector float32 (12,), 96 bytes
                        2 x metrics: personal.test.accuracy, 60 bytes

        a run without a name (apple; run 8)
          asked by  fl.example.org:9092, 2026-11-22T00:00:00Z to 2026-11-22T00:00:00Z
          with      app {"a" * 64}, settings {"b" * 16}
          let by    no allowed-apps
          left      1 messages, 14 bytes, rounds 1 to 1
                        1 x error: no such column, 14 bytes

        other months: 2026-10 (--month)

        ok    lines 1 to 5 in 1 files: none changed, missing or moved
        last  {last}  (keep it elsewhere; --seen looks for it)
        """)
    assert silofl("audit", log.folder, "--month", "2026-10", "--seen", last[:16]) == 0
    assert capsys.readouterr().out.startswith(
        "clinic, 2026-10: 1 runs, 1 messages, 78 bytes left"
    )


def test_a_falsified_log_is_exit_code_2(log, capsys):
    lines = text_of(log)
    write(log, [*lines[:2], flip(0.5)(lines[2]), *lines[3:]])
    assert silofl("audit", log) == 2
    out, err = capsys.readouterr()
    assert f"FAIL  {FIRST}, line 3: changed" in out
    fault = f"{FIRST}, line 3: changed, its hash is wrong"
    assert err == f"silofl audit: the audit log is not whole, 1 faults: {fault}\n"


def test_where_a_log_is_looked_for(tmp_path, monkeypatch, capsys):
    from server.deploy.bundle import Bundle

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert silofl("audit") == 2
    assert "name a state directory or a bundle" in capsys.readouterr().err
    assert silofl("audit", tmp_path) == 2
    assert "there is no audit log in" in capsys.readouterr().err
    Log(tmp_path / "silofl-site/clinic/state/audit").append(entry(1))
    Bundle("clinic", "net", "a:1", b"CA", b"KEY", "# pins\n").write(tmp_path / "clinic.tar")
    for where in ([], [str(tmp_path / "clinic.tar")]):
        assert silofl("audit", *where) == 0
        assert "clinic, 2026-11" in capsys.readouterr().out


def test_the_page_says_who_was_in_the_masked_sums():
    slots = [
        {"round": 1, "attempt": 1, "silos": 6, "unreadable": ["west"]},
        {"round": 1, "attempt": 2, "silos": 6},
        {"round": 1, "attempt": 2, "survivors": 6, "gone": []},
        {"round": 2, "attempt": 1, "silos": 6},
        {"round": 2, "attempt": 1, "survivors": 5, "gone": ["north"]},
    ]
    assert audit_page.masked_text([{"secure": slot} for slot in slots]) == (
        "2 rounds, 2 sums over 5 to 6 silos; 1 repeated; gone: north in round 2; no share that opens of west"
    )
    assert audit_page.masked_text([{"bytes": 3}, {"secure": None}]) == ""
