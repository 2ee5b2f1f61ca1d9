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
from partitions.datasets.download import decode_once, remark, require
from partitions.importing.tables import read_lines
from partitions.splits import Array, Dataset, Split, split_table
from partitions.tokens import LENGTH, Pieces, by_frequency, encode, read_vocabulary

# AG News

NEWS_CLASSES = 4  # World, Sports, Business, Sci/Tech
NEWS_PLACES = ("ag_news", "ag-news", "AG_NEWS", "ag_news_csv")


def load_ag_news(name: str, data_dir: str) -> Dataset:
    """Load AG News: 120,000 and 7,600 news of four classes, title and description, cut at 200 tokens.

    Tokens are words of torchtext's ``basic_english``. The vocabulary is all words of both files (FedALA pools them),
    the most frequent first. With ``test.csv`` only, a fixed 20 % of each of its classes are the test samples, and a
    warning is logged.
    """
    whence = "it is in ag_news_csv.tar.gz"
    test = require(name, ["test.csv"], NEWS_PLACES, data_dir, whence)
    train = test.parent / "train.csv"
    tables = [read_news(name, path) for path in (train, test) if path.is_file()]
    texts = [text for table in tables for text, _ in table]
    labels = [label for table in tables for _, label in table]
    vocabulary = by_frequency(texts)
    x, y = encode(texts, vocabulary, LENGTH).x, np.array(labels, np.int64)
    if len(tables) == 1:
        made = split_table(name, x, y, NEWS_CLASSES, vocabulary=vocabulary.size)
        remark(
            name,
            f"no train.csv beside {test}: its {len(y)} news alone are used, 80 % for training, 20 % for tests",
        )
        return made
    n = len(tables[0])
    return Dataset(
        name, Split(x[:n], y[:n]), Split(x[n:], y[n:]), NEWS_CLASSES, vocabulary=vocabulary.size
    )


def read_news(name: str, path: Path) -> list[tuple[str, int]]:
    """Return text and class, from 0, of each line ``"class 1-4","title","description"``.

    A backslash, which means a line break there, stays within its word, as in torchtext.
    """
    rows = []
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines = csv.reader(file, strict=True)
            for cells in lines:
                if len(cells) != 3 or cells[0] not in ("1", "2", "3", "4"):
                    raise DataError(
                        f"line {lines.line_num} is not class 1 to 4, title, description"
                    )
                rows.append((f"{cells[1]} {cells[2]}", int(cells[0]) - 1))
        if not rows:
            raise DataError("it is empty")
    except (OSError, ValueError, csv.Error) as error:
        raise DataError(
            f"{name}: {path} cannot be read ({error}); replace or delete it"
        ) from error
    return rows


# Sent-140

SENT_FILE = "training.1600000.processed.noemoticon.csv"
SENT_PLACES = ("sent140", "sent-140", "sentiment140", "Sentiment")
SENT_READ, SENT_USERS = 50, 15  # users for the vocabulary, of whom the last ones are the silos
BERT_FILE = "vocab.txt"


def load_sent140(name: str, data_dir: str) -> Dataset:
    """Load Sent-140: tweets of 15 users, unhappy (0) or happy (1), as in PLayer-FL.

    The silos are the users ranked 36 to 50 by their number of tweets, in a tie in the order of the file. With BERT's
    ``vocab.txt`` (uncased) beside the csv, tokens are its pieces, renumbered over those in the 50 users' tweets.
    Otherwise they are words by their frequency there. The choice is logged. The length is that of the longest tweet of
    the 50 users. For partitions other than `natural`, 20 % of each class are the test samples.
    """
    path = require(
        name,
        [SENT_FILE],
        SENT_PLACES,
        data_dir,
        "unpack it from Stanford's trainingandtestdata.zip",
    )
    bert = path.parent / BERT_FILE
    sources = [path, *([bert] if bert.is_file() else [])]

    def decode() -> dict[str, Array]:
        counts = Counter(user for user, _, _ in read_tweets(name, path))
        users = [user for user, _ in counts.most_common(SENT_READ)]
        chosen = set(users)
        tweets = [tweet for tweet in read_tweets(name, path) if tweet[0] in chosen]
        texts = [text for _, text, _ in tweets]
        x, size = own_tokens(texts, bert, 0)
        # Sorted by rank, each user's tweets in their order; silos have no account names.
        ranks = np.array([users.index(user) + 1 for user, _, _ in tweets])
        rows = np.concatenate(
            [np.flatnonzero(ranks == i + 1) for i in range(len(users))[-SENT_USERS:]]
        )
        y = np.array([happy for _, _, happy in tweets], np.int64)
        return {"x": x[rows], "y": y[rows], "rank": ranks[rows], "vocabulary": np.array(size)}

    arrays = decode_once(name, sources, decode)
    used = (
        "of BERT's vocab.txt"
        if len(sources) > 1
        else f"words by frequency, as there is no {bert} of BERT's"
    )
    remark(name, f"{len(arrays['y'])} tweets; tokens are {used}")
    users = np.array([f"user-{rank}" for rank in arrays["rank"]])
    return split_table(name, arrays["x"], arrays["y"], 2, users, int(arrays["vocabulary"]))


def read_tweets(name: str, path: Path) -> Iterator[tuple[str, str, int]]:
    """Yield user, text and class 0 or 1 of each line ``target, id, date, flag, user, text`` with a target of 0 or 4."""
    try:
        with path.open(encoding="utf-8", errors="replace", newline="") as file:
            lines = csv.reader(file)
            for cells in lines:
                if len(cells) != 6 or cells[0] not in ("0", "4"):
                    raise DataError(
                        f"line {lines.line_num} is not target 0 or 4, id, date, flag, user, text"
                    )
                yield cells[4], cells[5], int(cells[0] == "4")
    except (OSError, ValueError, csv.Error) as error:
        raise DataError(
            f"{name}: {path} cannot be read ({error}); replace or delete it"
        ) from error


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
    found, places = np.unique(np.append(x, 0), return_inverse=True)
    return places[:-1].reshape(x.shape).astype(np.int32), len(found)


# Notes of MIMIC-III

MIMIC_FILE = "mimic.csv"
MIMIC_PLACES = ("mimic", "mimic_iii", "mimic-iii", "mimic3")
MIMIC_GROUPS = ("mi", "gi", "infection", "brain")
MIMIC_LENGTH = 512


def load_mimic(name: str, data_dir: str) -> Dataset:
    """Load MIMIC-III: notes of the first day, and death in hospital; four groups of diagnoses, as in PLayer-FL.

    The data must not be redistributed, so the user makes the csv (see docs/data-sets.md): columns ``text``,
    ``mortality`` (0 or 1) and ``group`` (mi, gi, infection, brain), a line per admission. Tokens are as in
    :func:`load_sent140`, cut at 512. For partitions other than `natural`, 20 % of each class are the test samples.
    """
    whence = "make it of MIMIC-III as docs/data-sets.md says"
    path = require(name, [MIMIC_FILE], MIMIC_PLACES, data_dir, whence)
    bert = path.parent / BERT_FILE
    try:
        lines = read_lines(path)
        if missing := [
            column for column in ("text", "mortality", "group") if column not in lines.columns
        ]:
            raise DataError(f"it has no column {missing[0]}")
        for where, row in lines:
            number = where.rpartition(" ")[2]
            if (
                row["mortality"] not in ("0", "1")
                or row["group"] not in MIMIC_GROUPS
                or not row["text"]
            ):
                raise DataError(
                    f"line {number} is not text, mortality 0 or 1, group {', '.join(MIMIC_GROUPS)}"
                )
    except (OSError, ValueError, csv.Error) as error:
        raise DataError(
            f"{name}: {path} cannot be read ({error}); see docs/data-sets.md"
        ) from error
    rows = [row for group in MIMIC_GROUPS for _, row in lines if row["group"] == group]
    x, size = own_tokens([row["text"] for row in rows], bert, MIMIC_LENGTH)
    used = (
        "of BERT's vocab.txt"
        if bert.is_file()
        else f"words by frequency, as there is no {bert} of BERT's"
    )
    remark(name, f"{len(rows)} notes; tokens are {used}")
    y = np.array([int(row["mortality"]) for row in rows], np.int64)
    return split_table(name, x, y, 2, np.array([row["group"] for row in rows]), size)
