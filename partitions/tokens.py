"""Tokens of texts: the division of a text into words, and the number of each word.

0 is no word (padding at the end), 1 a word that is not in the vocabulary. There are three vocabularies:

* ``Words``: a list; word i is token i + 2. For a public data set, its own words, the most frequent first
  (`by_frequency`).
* ``Hashed``: no list; a word's token is a hash of it, the same in every process and on every machine.
* ``Pieces``: BERT's ``vocab.txt`` with its own numbers; other words are composed of pieces.

A vocabulary from hospitals' texts would disclose their content (docs/attacks.md). So hospitals use a hash, or a public
list.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from partitions.common.errors import DataError
from partitions.splits import Array, Shape

PADDING = 0
UNKNOWN = 1
FIRST_WORD = 2
LENGTH = 200  # tokens of a text; longer texts are cut
BUCKETS = 1 << 16
MOST_BUCKETS = 1 << 24
MOST_LENGTH = 1 << 16
CHINESE = re.compile(
    "[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002ceaf\U0002f800-\U0002fa1f]"
)
# Scripts without blanks between words: Thai, Lao, Tibetan, Burmese, Khmer, Japanese and Chinese, with their marks
UNSPACED = re.compile(
    "[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3000-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\uff01-\uff9f\U00020000-\U0002fa1f]"
)
LONGEST_WORD = 100  # characters; for BERT a longer word is unknown


def basic_english(text: str) -> list[str]:
    """Return the words of a text in lower case, with marks as separate words, as torchtext's ``basic_english``.

    Quotation marks, colons, semicolons and ``<br />`` become blanks or are removed.
    """
    spaced = re.sub(r"['.,()!?]", r" \g<0> ", text.lower().replace('"', ""))
    return re.sub("<br />|[;:]", " ", spaced).split()


def split_words(text: str, known: Container[str] = ()) -> Iterator[str]:
    """Yield a text's words; one that is not ``known``, in a script without blanks, character by character."""
    for word in basic_english(text):
        if word in known or word.isascii():
            yield word
        else:
            yield from UNSPACED.sub(r" \g<0> ", word).split()


# Each vocabulary has ``tokens(text)``, all tokens of a text; ``size``: all tokens are below it; ``unknown``: the token
# of an unknown word; ``end``: tokens at the end of every text, also of one that is cut.


class Words:
    """Vocabulary from a list of words; the first one is token 2."""

    unknown: int = UNKNOWN
    end: Shape = ()

    def __init__(self, words: Sequence[str]) -> None:
        self.number = {word: i for i, word in enumerate(words, FIRST_WORD)}
        self.size = FIRST_WORD + len(words)

    def tokens(self, text: str) -> list[int]:
        return [self.number.get(word, UNKNOWN) for word in split_words(text, self.number)]


class Hashed:
    """Vocabulary by hash: a word is token 2 + h mod ``buckets``, with h the first 64 bits of its SHA-256.

    Texts in scripts without blanks are divided by characters. No word is unknown, and several may share a token. Tokens
    are the same in every process and on every machine.
    """

    unknown: int = UNKNOWN
    end: Shape = ()

    def __init__(self, buckets: int = BUCKETS) -> None:
        if not 1 <= buckets <= MOST_BUCKETS:
            raise DataError(
                f"a vocabulary is hashed into 1 to {MOST_BUCKETS} numbers, not {buckets}"
            )
        self.buckets = buckets
        self.size = FIRST_WORD + buckets
        self.number: dict[str, int] = {}

    def tokens(self, text: str) -> list[int]:
        return [self.token(word) for word in split_words(text)]

    def token(self, word: str) -> int:
        """Return the token of one word."""
        if word not in self.number:
            digest = hashlib.sha256(word.encode(errors="surrogatepass")).digest()
            self.number[word] = FIRST_WORD + int.from_bytes(digest[:8], "big") % self.buckets
        return self.number[word]


class Pieces:
    """BERT's WordPiece (Devlin et al., NAACL 2019).

    A word is divided into the longest piece at its beginning, then the longest ``##piece`` at the beginning of the
    rest, and so on; a word that cannot be divided is ``[UNK]``. Texts are converted to lower case without accents,
    unless the list has capitals. ``[CLS]`` begins a text, ``[SEP]`` ends it.
    """

    def __init__(self, pieces: Sequence[str]) -> None:
        self.number = {piece: i for i, piece in enumerate(pieces)}
        if pieces[:1] != ["[PAD]"] or not {"[UNK]", "[CLS]", "[SEP]"} <= set(pieces):
            raise DataError(
                "is no vocab.txt of BERT's: it begins with [PAD], and has [UNK], [CLS] and [SEP]"
            )
        self.size = len(pieces)
        self.unknown = self.number["[UNK]"]
        self.start: int = self.number["[CLS]"]
        self.end: Shape = (self.number["[SEP]"],)
        self.cased = any(
            piece != piece.lower() for piece in pieces if not piece.startswith("[")
        )

    def tokens(self, text: str) -> list[int]:
        return [
            self.start,
            *(n for word in self.words(text) for n in self.pieces(word)),
            *self.end,
        ]

    def words(self, text: str) -> list[str]:
        """Return a text's words; marks and Chinese characters are separate words."""
        kept = "".join(" " if c.isspace() else c for c in text if not _is_control(c))
        if not self.cased:
            plain = unicodedata.normalize("NFD", kept.lower())
            kept = "".join(c for c in plain if unicodedata.category(c) != "Mn")
        apart = (f" {c} " if _is_mark(c) or CHINESE.match(c) else c for c in kept)
        return "".join(apart).split()

    def pieces(self, word: str) -> list[int]:
        """Return the tokens of a word's pieces."""
        tokens: list[int] = []
        start = 0
        while start < len(word) <= LONGEST_WORD:
            for end in range(len(word), start, -1):
                piece = self.number.get(("##" if start else "") + word[start:end])
                if piece is not None:
                    break
            else:
                return [self.unknown]
            tokens.append(piece)
            start = end
        return tokens or [self.unknown]


Vocabulary = Words | Hashed | Pieces


def _is_control(character: str) -> bool:
    kind = unicodedata.category(character)
    return character in "\0\ufffd" or (kind.startswith("C") and not character.isspace())


def _is_mark(character: str) -> bool:
    """Return whether a character is a mark: ASCII's that are neither letter, digit nor space; Unicode's punctuation."""
    if character.isascii():
        return character.isprintable() and not character.isalnum() and character != " "
    return unicodedata.category(character).startswith("P")


def by_frequency(texts: Iterable[str]) -> Words:
    """Return all words of these texts, the most frequent first, words of equal frequency in alphabetical order."""
    counts = Counter(word for text in texts for word in basic_english(text))
    return Words(sorted(counts, key=lambda word: (-counts[word], word)))


def read_vocabulary(path: Path) -> Words | Pieces:
    """Read a vocabulary with one word per line: BERT's where the first line is ``[PAD]``, else a list of words.

    Raises DataError, one line, for an invalid file.
    """
    try:
        lines = path.read_text("utf-8").removeprefix("\ufeff").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} cannot be read ({error}); a vocabulary has one word per line, in UTF-8"
        ) from error
    words = [line.removesuffix("\r") for line in (lines if lines[-1] else lines[:-1])]
    if words[:1] == ["[PAD]"]:
        try:
            return Pieces(words)
        except ValueError as error:
            raise DataError(f"{path} {error}") from None
    if not words:
        raise DataError(f"{path} is empty; a vocabulary has one word per line")
    seen: dict[str, int] = {}
    for number, word in enumerate(words, 1):
        if basic_english(word) != [word]:
            raise DataError(
                f"{path}, line {number}, is no single word in small letters, so that no text could have it"
            )
        if word in seen:
            raise DataError(f"{path}, line {number}, has the word of line {seen[word]} again")
        seen[word] = number
    return Words(words)


def parse_vocabulary(wanted: str) -> tuple[Vocabulary, str]:
    """Return the vocabulary for ``hashed``, ``hashed:BUCKETS`` or a file's path, and a note that hospitals compare."""
    kind, _, number = wanted.partition(":")
    if kind == "hashed":
        if number and not (number.isascii() and number.isdigit()):
            raise DataError(
                f"--vocabulary is {wanted[:40]!r}; write hashed:{BUCKETS}, or the path of a file of words"
            )
        hashed = Hashed(int(number or BUCKETS))
        note = f"words are hashed into {hashed.buckets} numbers (hashed:{hashed.buckets})"
        return hashed, note
    path = Path(wanted)
    if not path.is_file():
        raise DataError(
            f"there is no vocabulary {path}; name a file of one word per line, or hashed:{BUCKETS}"
        )
    vocabulary = read_vocabulary(path)
    what = "pieces of words" if isinstance(vocabulary, Pieces) else "words"
    return (
        vocabulary,
        f"{len(vocabulary.number)} {what} in {path.name}, SHA-256 {file_digest(wanted)}: "
        "every hospital must have the same",
    )


def file_digest(vocabulary: str) -> str:
    """Return the SHA-256 of a vocabulary's file; "" for one that is hashed, or for none."""
    if not vocabulary or vocabulary.partition(":")[0] == "hashed":
        return ""
    return hashlib.sha256(Path(vocabulary).read_bytes()).hexdigest()


def token_setting(vocabulary: str, sha256: str) -> str:
    """Return how texts become tokens, as hospitals compare it; "" where that is not stated."""
    kind, _, buckets = vocabulary.partition(":")
    if kind == "hashed":
        return f"hashed:{int(buckets or BUCKETS)}"
    return f"words, SHA-256 {sha256[:16]}" if sha256 else ""


@dataclass(frozen=True)
class EncodedTexts:
    """Encoded texts: tokens ``x``, int32 (n, length), and three counts.

    The counts are ``cut`` texts, all ``words`` (or pieces), and ``unknown`` words.
    """

    x: Array
    cut: int
    words: int
    unknown: int


def encode(texts: Sequence[str], vocabulary: Vocabulary, length: int = 0) -> EncodedTexts:
    """Return the tokens of each text, cut at ``length`` and padded with 0; a length of 0: that of the longest text."""
    if not 0 <= length <= MOST_LENGTH:
        raise DataError(f"a text has 1 to {MOST_LENGTH} tokens, not {length}")
    numbered = [vocabulary.tokens(text) for text in texts]
    longest = length or max(map(len, numbered), default=0) or 1
    x = np.zeros((len(numbered), longest), np.int32)
    for row, tokens in zip(x, numbered, strict=True):
        if len(tokens) > longest:
            tokens = [*tokens[: longest - len(vocabulary.end)], *vocabulary.end][:longest]
        row[: len(tokens)] = tokens
    return EncodedTexts(
        x,
        sum(len(tokens) > longest for tokens in numbered),
        sum(map(len, numbered)),
        sum(tokens.count(vocabulary.unknown) for tokens in numbered),
    )
