"""Data sets of texts: AG News, Sent-140, and notes of MIMIC-III from a csv that the user makes.

Texts are read as tokens (``tokens.py``).
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from partitions.common.errors import DataError
from partitions.datasets.registry import Source
from partitions.importing.tables import read_lines
from partitions.splits import Array, Arrays, Dataset, Split
from partitions.tokens import LENGTH, Pieces, by_frequency, encode, read_vocabulary

# AG News


def load_ag_news(source: Source) -> Dataset:
    """Load AG News: 120,000 and 7,600 news of four classes, title and description, cut at 200 tokens.

    Tokens are words of torchtext's ``basic_english``. The vocabulary is all words of both files (FedALA pools them),
    the most frequent first. With ``test.csv`` only, a fixed 20 % of each of its classes are the test samples, and a
    warning is logged.
    """
    test = source.require("test.csv")
    train = test.parent / "train.csv"
    tables = [read_news(source, path) for path in (train, test) if path.is_file()]
    texts, labels = zip(*(row for table in tables for row in table), strict=True)
    vocabulary = by_frequency(texts)
    x, y = encode(texts, vocabulary, LENGTH).x, np.array(labels, np.int64)
    if len(tables) == 1:
        source.remark(
            f"no train.csv beside {test}: its {len(y)} news alone are used, 80 % for training, 20 % for tests"
        )
        return source.divide_table(x, y, vocabulary=vocabulary.size)
    n = len(tables[0])
    return source.in_parts(Split(x[:n], y[:n]), Split(x[n:], y[n:]), vocabulary=vocabulary.size)


def read_news(source: Source, path: Path) -> list[tuple[str, int]]:
    """Return text and class, from 0, of each line ``"class 1-4","title","description"``.

    A backslash, which means a line break there, stays within its word, as in torchtext.
    """
    rows = []
    with source.reading(path), path.open(encoding="utf-8", newline="") as file:
        lines = csv.reader(file, strict=True)
        for cells in lines:
            if len(cells) != 3 or cells[0] not in ("1", "2", "3", "4"):
                raise DataError(
                    f"line {lines.line_num} is not class 1 to 4, title, description"
                )
            rows.append((f"{cells[1]} {cells[2]}", int(cells[0]) - 1))
        if not rows:
            raise DataError("it is empty")
    return rows


# Sent-140

SENT_FILE = "training.1600000.processed.noemoticon.csv"
SENT_READ, SENT_USERS = 50, 15  # users for the vocabulary, of whom the last ones are the silos
BERT_FILE = "vocab.txt"


def load_sent140(source: Source) -> Dataset:
    """Load Sent-140: tweets of 15 users, unhappy (0) or happy (1), as in PLayer-FL.

    The silos are the users ranked 36 to 50 by their number of tweets, in a tie in the order of the file. With BERT's
    ``vocab.txt`` (uncased) beside the csv, tokens are its pieces, renumbered over those in the 50 users' tweets.
    Otherwise they are words by their frequency there. The choice is logged. The length is that of the longest tweet of
    the 50 users. For partitions other than `natural`, 20 % of each class are the test samples.
    """
    path = source.require(SENT_FILE)
    bert = path.parent / BERT_FILE

    def decode() -> Arrays:
        counts = Counter(user for user, _, _ in read_tweets(source, path))
        rank = {user: i for i, (user, _) in enumerate(counts.most_common(SENT_READ), 1)}
        tweets = [tweet for tweet in read_tweets(source, path) if tweet[0] in rank]
        x, size = own_tokens([text for _, text, _ in tweets], bert, 0)
        # Sorted by rank, each user's tweets in their order; silos have no account names.
        ranks = np.array([rank[user] for user, _, _ in tweets])
        order = np.argsort(ranks, kind="stable")
        rows = order[ranks[order] > len(rank) - SENT_USERS]
        y = np.array([happy for _, _, happy in tweets], np.int64)
        return {"x": x[rows], "y": y[rows], "rank": ranks[rows], "vocabulary": np.array(size)}

    arrays = source.once([path, *[bert] * bert.is_file()], decode)
    source.remark(f"{len(arrays['y'])} tweets; tokens are {kind_of_tokens(bert)}")
    users = np.char.add("user-", arrays["rank"].astype(str))
    return source.divide_table(
        arrays["x"], arrays["y"], users, vocabulary=int(arrays["vocabulary"])
    )


def read_tweets(source: Source, path: Path) -> Iterator[tuple[str, str, int]]:
    """Yield user, text and class 0 or 1 of each line ``target, id, date, flag, user, text`` with a target of 0 or 4."""
    with (
        source.reading(path),
        path.open(encoding="utf-8", errors="replace", newline="") as file,
    ):
        lines = csv.reader(file)
        for cells in lines:
            if len(cells) != 6 or cells[0] not in ("0", "4"):
                raise DataError(
                    f"line {lines.line_num} is not target 0 or 4, id, date, flag, user, text"
                )
            yield cells[4], cells[5], int(cells[0] == "4")


def kind_of_tokens(bert: Path) -> str:
    """Return what :func:`own_tokens` makes, for the log."""
    if bert.is_file():
        return "of BERT's vocab.txt"
    return f"words by frequency, as there is no {bert} of BERT's"


def own_tokens(texts: Sequence[str], bert: Path, length: int) -> tuple[Array, int]:
    """Return tokens, int32 (n, length), and the size of the vocabulary; a length of 0: that of the longest text.

    If the file ``bert`` (``vocab.txt``) exists, tokens are its pieces, renumbered over those that occur (0 stays
    padding). Otherwise they are words by frequency.
    """
    if not bert.is_file():
        words = by_frequency(texts)
        return encode(texts, words, length).x, words.size
    pieces = read_vocabulary(bert)
    if not isinstance(pieces, Pieces):
        raise DataError(
            f"{bert} is no vocab.txt of BERT's: it begins with [PAD]; replace or delete it"
        )
    x = encode(texts, pieces, length).x
    used, places = np.unique(np.append(x, 0), return_inverse=True)
    return places[:-1].reshape(x.shape).astype(np.int32), len(used)


# Notes of MIMIC-III

MIMIC_GROUPS = ("mi", "gi", "infection", "brain")
MIMIC_LENGTH = 512


def load_mimic(source: Source) -> Dataset:
    """Load MIMIC-III: notes of the first day, and death in hospital; four groups of diagnoses, as in PLayer-FL.

    The data must not be redistributed, so the user makes the csv (see docs/data-sets.md): columns ``text``,
    ``mortality`` (0 or 1) and ``group`` (mi, gi, infection, brain), a line per admission. Tokens are as in
    :func:`load_sent140`, cut at 512. For partitions other than `natural`, 20 % of each class are the test samples.
    """
    path = source.require("mimic.csv")
    bert = path.parent / BERT_FILE
    with source.reading(path):
        lines = read_lines(path)
        for column in ("text", "mortality", "group"):
            if column not in lines.columns:
                raise DataError(f"it has no column {column}")
        for where, row in lines:
            known = row["mortality"] in ("0", "1") and row["group"] in MIMIC_GROUPS
            if not known or not row["text"]:
                raise DataError(
                    f"line {where.rpartition(' ')[2]} is not text, mortality 0 or 1, group {', '.join(MIMIC_GROUPS)}"
                )
    rows = sorted((row for _, row in lines), key=lambda row: MIMIC_GROUPS.index(row["group"]))
    x, size = own_tokens([row["text"] for row in rows], bert, MIMIC_LENGTH)
    source.remark(f"{len(rows)} notes; tokens are {kind_of_tokens(bert)}")
    y = np.array([int(row["mortality"]) for row in rows], np.int64)
    return source.divide_table(x, y, np.array([row["group"] for row in rows]), vocabulary=size)
