"""Texts as tokens: the words of a text, the three vocabularies, and what is cut and filled."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from failing import fails
from public_data import DATA, needs

from partitions.datasets.registry import DATASETS, Source
from partitions.datasets.texts import read_news
from partitions.tokens import (
    Hashed,
    Pieces,
    Words,
    basic_english,
    by_frequency,
    encode,
    parse_vocabulary,
    read_vocabulary,
)

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "text, words",
    [
        ("Fears for T N pension.", ["fears", "for", "t", "n", "pension", "."]),
        ("can't (really)!", ["can", "'", "t", "(", "really", ")", "!"]),
        ('"Why?" he said: 5;6<br />no', ["why", "?", "he", "said", "5", "6", "no"]),
        ("U.S. 3,000", ["u", ".", "s", ".", "3", ",", "000"]),
        ("a second\\team of $10-million", ["a", "second\\team", "of", "$10-million"]),
        ("  \t\n", []),
    ],
)
def test_words_of_a_text(text, words):
    """As torchtext's ``basic_english``: marks are words, quotation marks vanish, a backslash divides nothing."""
    assert basic_english(text) == words


def test_the_most_frequent_word_is_the_first():
    """b three times, a and c twice each, d once; 0 and 1 are no words."""
    vocabulary = by_frequency(["b c", "a b c", "B a d"])
    assert vocabulary.number == {"b": 2, "a": 3, "c": 4, "d": 5} and vocabulary.size == 6
    assert vocabulary.tokens("D e b") == [5, 1, 2]


def test_a_text_is_cut_and_filled():
    made = encode(["a b c d", "b", "", "x a"], Words(["a", "b", "c"]), 3)
    assert made.x.dtype == np.int32 and made.x.tolist() == [
        [2, 3, 4],
        [3, 0, 0],
        [0, 0, 0],
        [1, 2, 0],
    ]
    assert (made.cut, made.words, made.unknown) == (1, 7, 2)
    assert encode(["a", "a b c d"], Words(["a"]), 0).x.shape == (2, 4)
    fails(ValueError, "1 to 65536 tokens, not -1", encode, ["a"], Words(["a"]), -1)


def test_a_hash_is_the_words_sha_256():
    """No list, no unknown words; 0 and 1 stay free."""
    vocabulary = Hashed(1000)
    wanted = 2 + int(hashlib.sha256(b"fever").hexdigest()[:16], 16) % 1000
    assert vocabulary.tokens("Fever fever") == [wanted, wanted]
    assert vocabulary.size == 1002
    tokens = Hashed(7).tokens(" ".join(map(str, range(200))))
    assert set(tokens) == set(range(2, 9))
    for buckets in (0, 1 << 25):
        fails(ValueError, "is hashed into 1 to 16777216 numbers", Hashed, buckets)


def test_a_hash_is_the_same_in_every_process():
    """Python's own differs with PYTHONHASHSEED."""
    code = "from partitions.tokens import Hashed; print(Hashed().tokens('Pat. with chest pain')); print(hash('a'))"
    answers = []
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
        )
        answers.append(done.stdout.splitlines())
    assert answers[0][0] == answers[1][0] and answers[0][1] != answers[1][1]


NEWS = Source("ag-news", "", DATASETS["ag-news"])


@needs("ag_news/test.csv")
@pytest.mark.parametrize(
    "buckets, news, found, right, guess",
    [(65536, 64, 92, 71, 4), (4096, 64, 92, 15, 4), (65536, 500, 84, 74, 19)],
)
def test_what_a_hash_gives_away(buckets, news, found, right, guess):
    """The figures of docs/attacks.md, in per cent, mean of ten silos: whoever knows which rows of an embedding changed,
    those of the tokens that occur, and the words of all other news, hashes these and looks.
    """
    texts = [set(basic_english(text)) for text, _ in read_news(NEWS, DATA / "ag_news/test.csv")]
    rng, hashed = np.random.default_rng(0), Hashed(buckets)
    shares = []
    for _ in range(10):
        order = rng.permutation(len(texts))
        own, known = (
            set().union(*(texts[i] for i in part)) for part in (order[:news], order[news:])
        )
        changed = {hashed.token(word) for word in own}
        named = {word for word in known if hashed.token(word) in changed}
        hits = len(named & own)
        shares.append((hits / len(own), hits / len(named), len(own & known) / len(known)))
    assert np.rint(100 * np.mean(shares, axis=0)).tolist() == [found, right, guess]


PIECES = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "un",
    "##aff",
    "##able",
    "aff",
    "able",
    "cafe",
    "!",
    "中",
    "##a",
]


def test_words_are_put_together_of_pieces():
    """The longest piece first: un ##aff ##able, as in BERT's own example; small letters, without accents."""
    vocabulary = Pieces(PIECES)
    assert vocabulary.tokens("Unaffable Café!") == [2, 4, 5, 6, 9, 10, 3]
    assert vocabulary.tokens("able unaffx 中able\u200b") == [2, 8, 1, 11, 8, 3]
    assert vocabulary.tokens("un" + 50 * "a") == [2, 4, *50 * [12], 3]
    assert vocabulary.tokens("un" + 99 * "a") == [2, 1, 3]  # 101 characters are too many
    assert vocabulary.tokens("") == [2, 3]


def test_capitals_stay_where_the_pieces_have_some():
    vocabulary = Pieces([*PIECES[:4], "Café", "cafe"])
    assert vocabulary.tokens("Café cafe Cafe") == [2, 4, 5, 1, 3]


def test_a_text_that_is_cut_still_ends():
    made = encode(["able able able able", "able"], Pieces(PIECES), 4)
    assert made.x.tolist() == [[2, 8, 8, 3], [2, 8, 3, 0]] and made.cut == 1


def test_a_file_of_words(tmp_path):
    path = tmp_path / "words.txt"
    path.write_bytes(b"\xef\xbb\xbffever\r\ncaf\xc3\xa9\n.\n")
    vocabulary, said = parse_vocabulary(str(path))
    assert vocabulary.tokens("Fever. Café cough") == [2, 4, 3, 1] and vocabulary.size == 5
    assert (
        said.startswith("3 words in words.txt, SHA-256 ")
        and hashlib.sha256(path.read_bytes()).hexdigest() in said
    )


def test_a_file_of_pieces(tmp_path):
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(PIECES) + "\n", "utf-8")
    vocabulary, said = parse_vocabulary(str(path))
    assert (
        isinstance(vocabulary, Pieces)
        and vocabulary.size == len(PIECES)
        and "13 pieces of words in" in said
    )


@pytest.mark.parametrize(
    "content, fault",
    [
        (b"", "is empty"),
        (b"fever\nchest pain\n", "line 2, is no single word in small letters"),
        (b"fever\nPain\n", "line 2, is no single word"),
        (b"fever\n\npain\n", "line 2, is no single word"),
        (b"fever\npain\nfever\n", "line 3, has the word of line 1 again"),
        (b"\xff\xfe", "cannot be read .*UTF-8"),
        (b"[PAD]\n[UNK]\nun\n", r"no vocab.txt of BERT's: it begins with \[PAD\], and has"),
    ],
)
def test_a_faulty_vocabulary_is_one_clear_line(tmp_path, content, fault):
    path = tmp_path / "words.txt"
    path.write_bytes(content)
    said = fails(ValueError, fault, read_vocabulary, path)
    assert "words.txt" in said


@pytest.mark.parametrize(
    "asked, fault",
    [
        ("hashed:many", "--vocabulary is 'hashed:many'; write hashed:65536, or the path"),
        ("hashed:0", "1 to 16777216 numbers, not 0"),
        ("nowhere.txt", "there is no vocabulary nowhere.txt; name a file"),
    ],
)
def test_a_vocabulary_that_cannot_be_met(asked, fault):
    fails(ValueError, fault, parse_vocabulary, asked)


def test_hashed_without_a_number_is_the_default():
    vocabulary, said = parse_vocabulary("hashed")
    assert vocabulary.size == 65538 and "hashed:65536" in said
