"""A history that has become large is compressed: the same text, added to by one write per round."""

from __future__ import annotations

import gzip

import pytest
from failing import fails
from resuming import assert_equal, crash_after, interrupted
from tiny import federate, notes

from partitions.common.errors import DataError
from server.report.study import StudyResults
from server.results import history
from server.results.history import History, Row, history_file
from server.run.withdrawal import withdraw

OPTIONS = {"strategy": "apple", "rounds": 4, "learning_rate": 0.3}


def rows_of(server_round: int, count: int = 8) -> list[Row]:
    values = ("test", "received", "accuracy", 1 / (server_round + 1), 10)
    return [Row("apple", 7, server_round, f"silo-{k}", *values) for k in range(count)]


@pytest.fixture
def large(monkeypatch):
    monkeypatch.setattr(history, "LARGE", 1000)


@pytest.fixture
def file(large, tmp_path):
    """A history of four rounds, compressed since the third."""
    kept = History(tmp_path / "history.csv")
    for number in range(1, 5):
        kept.add(rows_of(number))
        assert (tmp_path / "history.csv").exists() == (number < 3)
    return history_file(tmp_path / "history.csv")


def test_it_is_the_text_of_a_plain_one(file, tmp_path, monkeypatch):
    monkeypatch.undo()
    plain = History(tmp_path / "plain/history.csv")
    for number in range(1, 5):
        plain.add(rows_of(number))
    assert file.name == "history.csv.gz"
    assert gzip.decompress(file.read_bytes()) == (tmp_path / "plain/history.csv").read_bytes()
    again = History(tmp_path / "history.csv")
    assert again.rows == plain.rows and again.digest("apple", 7) == plain.digest("apple", 7)


def test_a_round_is_added_and_nothing_is_written_again(file, tmp_path):
    kept, before = History(tmp_path / "history.csv"), file.read_bytes()
    kept.add(rows_of(5))
    assert file.read_bytes().startswith(before)
    added = len(file.read_bytes()) - len(before)
    kept.add(rows_of(6))
    assert len(file.read_bytes()) - len(before) < 3 * added


def test_a_round_that_a_power_cut_has_torn_is_left_out(file, tmp_path):
    whole, rows = len(file.read_bytes()), History(tmp_path / "history.csv").rows
    History(tmp_path / "history.csv").add(rows_of(5))
    content = file.read_bytes()
    for cut in range(whole + 2, len(content)):
        file.write_bytes(content[:cut])
        read = History(tmp_path / "history.csv").rows
        assert read[: len(rows)] == rows and {r.round for r in read[len(rows) :]} <= {5}


def test_one_with_other_bytes_is_named(file, tmp_path):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 255
    file.write_bytes(content)
    fails(DataError, r"history\.csv\.gz is damaged", History, tmp_path / "history.csv")


def test_a_crash_between_the_two_files_costs_nothing(file, tmp_path):
    rows = History(tmp_path / "history.csv").rows
    (tmp_path / "history.csv").write_bytes(b"left behind\n")
    assert History(tmp_path / "history.csv").rows == rows


def test_a_resumed_run_is_an_undisturbed_one(three, tmp_path, large):
    whole = federate(three, directory=tmp_path / "whole", **OPTIONS)
    interrupted(three, tmp_path / "parts", watch=crash_after(3), **OPTIONS)
    assert history_file(tmp_path / "parts/history.csv").suffix == ".gz"
    resumed = federate(three, directory=tmp_path / "parts", resume=True, **OPTIONS)
    assert_equal(whole, resumed, (tmp_path / "whole", tmp_path / "parts"))
    assert notes(tmp_path / "parts") == [] and not (tmp_path / "parts/history.csv").exists()


def test_report_and_withdrawal_read_it(three, tmp_path, large):
    run = tmp_path / "run"
    federate(three, directory=run, **OPTIONS)
    rows = StudyResults(run).history.rows
    assert {row.silo for row in rows} == {"", "a", "b", "c"}
    assert any("history.csv.gz" in line for line in withdraw("c", [run]))
    assert {row.silo for row in StudyResults(run).history.rows} == {"", "a", "b"}
