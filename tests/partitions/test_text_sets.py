"""Data sets of texts: AG News, Sent-140 and MIMIC-III's notes, in the layouts in which they are published."""

from __future__ import annotations

import csv
import logging

import numpy as np
import pytest
from failing import fails
from numpy.testing import assert_array_equal
from public_data import DATA, cannot_load, load, needs
from taken import splits_of

from partitions.datasets.registry import load_dataset
from partitions.schemes.registry import partition, silo_data
from partitions.splits import take


class Said(logging.Handler):
    """The lines that Flower's log got."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


@pytest.fixture
def said(monkeypatch):
    handler = Said()
    monkeypatch.setattr(logging.getLogger("flwr"), "handlers", [handler])
    return handler.lines


pytestmark = pytest.mark.usefixtures("own_places")


def write_csv(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows(rows)
    return path


# AG News


@needs("ag_news/test.csv")
def test_the_published_test_file(said):
    """7,600 rows, 1,900 of each class; a median of 42 tokens, 85 at the 99th percentile, 161 at most."""
    data = load("ag-news", DATA)
    assert np.bincount(data.labels).tolist() == [1900] * 4 and (
        len(data.train),
        len(data.test),
    ) == (6080, 1520)
    assert data.input_shape == ("tokens", 200, 25272) and data.train.x.dtype == np.int32
    x = np.concatenate([data.train.x, data.test.x])
    lengths = (x > 0).sum(axis=1)
    assert (np.median(lengths), np.percentile(lengths, 99), lengths.max()) == (42, 85, 161)
    assert (x[np.arange(len(x)), lengths - 1] > 0).all()  # padding is behind
    assert set(np.unique(x)) == {0, *range(2, 25272)}
    counts = np.bincount(x.ravel())[2:]
    assert (np.diff(counts) <= 0).all()
    assert [line for line in said if "no train.csv" in line and "7600 news alone" in line]


def test_both_files_of_ag_news(tmp_path, said):
    """One vocabulary of both: b four times, a and c twice, 'x\\y' once; parts as published."""
    write_csv(tmp_path / "ag_news/train.csv", [["1", "B b", "a"], ["4", "B", "c b"]])
    write_csv(tmp_path / "ag_news/test.csv", [["3", "A", 'c "x\\y"']])
    data = load("ag-news", tmp_path)
    assert data.vocabulary == 6 and data.input_shape == ("tokens", 200, 6)
    assert data.train.x[:, :4].tolist() == [[2, 2, 3, 0], [2, 4, 2, 0]] and data.test.x[
        0, :4
    ].tolist() == [3, 4, 5, 0]
    assert (data.train.y.tolist(), data.test.y.tolist(), said) == ([0, 3], [2], [])
    silos = partition(data, "iid", silos=1, seed=0)
    assert silo_data(data, silos[0]).vocabulary == 6


@pytest.mark.parametrize(
    "rows, fault",
    [
        ([["1", "t", "d"], ["5", "t", "d"]], "line 2 is not class 1 to 4"),
        ([["1", "t"]], "line 1 is not class 1 to 4, title, description"),
        ([], "it is empty"),
    ],
)
def test_damaged_ag_news(tmp_path, rows, fault):
    path = write_csv(tmp_path / "test.csv", rows)
    said = cannot_load("ag-news", tmp_path, fault)
    assert str(path) in said


# Sent-140

BERT = "[PAD] [UNK] [CLS] [SEP] never good bad ##ly @ u"


def tweets(folder, users=52):
    """Of user i 54 - i tweets, but of the last two (ranks 51 and 52) 2 each; user i says "good" + "ly" or "bad"."""
    rows = []
    for i in range(users):
        for k in range(max(54 - i, 2)):
            text = f"@u bad{' bad' * (k == 0)} u{i}" if k % 2 else "Goodly never"
            rows.append(["0" if k % 2 else "4", str(k), "Mon", "NO_QUERY", f"user{i}", text])
    rng = np.random.default_rng(0)
    return write_csv(
        folder / "training.1600000.processed.noemoticon.csv",
        [rows[i] for i in rng.permutation(len(rows))],
    )


def test_the_last_fifteen_of_the_fifty_users_with_most_tweets(tmp_path, said):
    """Ranks 36 to 50 have 54 - 35 = 19 down to 5 tweets; every user's tweets stay together."""
    tweets(tmp_path / "sent140")
    data = load("sent140", tmp_path)
    assert data.groups is not None
    assert {name: len(rows) for name, rows in data.groups.items()} == {
        f"user-{r}": 55 - r for r in range(36, 51)
    }
    assert (data.classes, data.task, data.own_test) == (2, "multiclass", False)
    silos = partition(data, "natural", silos=15, seed=0)
    assert [silo.origin for silo in silos][::7] == ["user-36", "user-43", "user-50"]
    # 19 tweets: 4 for testing, 3 of the other 15 for validation.
    assert [len(part) for part in splits_of(silos[0])] == [12, 3, 4]
    # good + ly is one word here: words of 50 users, u0 to u49, besides "@u", "bad", "goodly" and "never".
    assert data.vocabulary == 2 + 4 + 50 and data.input_shape == ("tokens", 3, 56)
    assert len(said) == 1 and "words by frequency, as there is no" in said[0]
    mine = take(data, data.groups["user-40"])
    assert sorted(mine.y.tolist()) == 7 * [0] + 8 * [1]
    third = mine.x[mine.y == 0, 2]
    assert len(set(third.tolist())) == 1  # u39, and no other user's name
    load_dataset.__globals__["_load"].cache_clear()
    again = load("sent140", tmp_path)  # out of the cache
    assert_array_equal(again.train.x, data.train.x)


def test_berts_pieces_where_its_list_is_there(tmp_path, said):
    """Numbered anew by what occurs: all but "u" alone, [CLS] good ##ly never [SEP], [UNK] for u0 and so on."""
    tweets(tmp_path / "sent140")
    (tmp_path / "sent140/vocab.txt").write_text("\n".join(f"{BERT} ##never".split()) + "\n")
    data = load("sent140", tmp_path)
    happy = np.concatenate([data.train.x[data.train.y == 1], data.test.x[data.test.y == 1]])
    assert np.unique(happy, axis=0).tolist() == [[2, 5, 7, 4, 3, 0]]
    unhappy = np.concatenate([data.train.x[data.train.y == 0], data.test.x[data.test.y == 0]])
    assert np.unique(unhappy, axis=0).tolist() == [[2, 8, 9, 6, 1, 3]]
    assert data.input_shape == ("tokens", 6, 10)  # of 11 pieces one does not occur
    assert "tokens are of BERT's vocab.txt" in said[0]


def test_faults_of_sent140(tmp_path):
    cannot_load(
        "sent140",
        tmp_path,
        r"sent140: there is no training\.1600000.*; unpack it from .*, and put it into",
    )
    path = tweets(tmp_path)
    (tmp_path / "vocab.txt").write_text("good\nbad\n")
    cannot_load("sent140", tmp_path, r"vocab.txt is no vocab.txt of BERT's")
    with path.open("a") as file:
        file.write('"2","1","Mon","NO_QUERY","u","text"\n')
    fails(ValueError, r"line \d+ is not target 0 or 4, id", load, "sent140", tmp_path)


# MIMIC-III


def test_notes_in_four_groups(tmp_path, said):
    rows = [["group", "text", "mortality"]]
    rows += [
        [group, f"Pt {group} note\nline {i}", str(i % 2)]
        for i in range(10)
        for group in ("brain", "gi", "mi")
    ]
    rows += [["infection", 600 * "long ", "0"]] * 5
    write_csv(tmp_path / "mimic/mimic.csv", rows)
    data = load("mimic", tmp_path)
    assert data.groups is not None and {name: len(g) for name, g in data.groups.items()} == {
        "mi": 10,
        "gi": 10,
        "infection": 5,
        "brain": 10,
    }
    assert (
        data.input_shape == ("tokens", 512, data.vocabulary)
        and data.vocabulary == 2 + 4 + 3 + 10
    )
    assert (
        take(data, data.groups["infection"]).x == 2
    ).all() and "35 notes; tokens are words" in said[0]


@pytest.mark.parametrize(
    "rows, fault",
    [
        ([["text", "mortality"], ["a", "0"]], "it has no column group"),
        (
            [["text", "mortality", "group"], ["a", "0", "mi"], ["secret note", "2", "mi"]],
            "line 3 is not text, mortality",
        ),
        ([["text", "mortality", "group"], ["secret note", "0", "heart"]], "line 2 is not text"),
        ([["text", "mortality", "group"], ["", "0", "mi"]], "line 2 is not text"),
    ],
)
def test_faulty_notes_are_named_and_not_quoted(tmp_path, rows, fault):
    write_csv(tmp_path / "mimic.csv", rows)
    said = cannot_load("mimic", tmp_path, fault)
    assert "secret" not in said


@pytest.mark.parametrize("name, what", [("ag-news", "test.csv"), ("mimic", "mimic.csv")])
def test_what_is_missing_is_named(tmp_path, name, what):
    fails(
        ValueError,
        rf"{name}: there is no {what}; .*, and put it into {tmp_path}",
        load,
        name,
        tmp_path,
    )
