"""What tests of parsers are made of (hypothesis): a valid document with edits in it, and values of any kind."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

# The same examples every time, and few: SILOFL_EXAMPLES=5000 looks longer.
FEW = settings(
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=int(os.environ.get("SILOFL_EXAMPLES", "30")),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

# What parsers stumble over: brackets, quotes, depth, digits without end, other alphabets, half of a character.
PIECES = [
    b"",
    b"\n",
    b"\0",
    b"\xff",
    b"[",
    b"]",
    b"{",
    b"}",
    b'"',
    b"'",
    b":",
    b",",
    b"=",
    b"#",
    b"-",
    b"~",
    b"&a ",
    b"*a",
]
PIECES += [
    b"[" * 2000,
    b"{a:" * 2000,
    b'{"a":' * 2000,
    b"9" * 5000,
    b"1e999",
    b"1_0",
    b"nan",
    b"-1",
    b"0",
    b"true",
    b"null",
]
PIECES += [
    b"\xc3\xa4",
    b"\xef\xbc\x91",
    b"\xed\xa0\x80",
    b"\r",
    b"\x1b[2J",
    b"<<: ",
    b"!!int ",
    b"!!timestamp ",
    b"? ",
]
PIECES += [b"1979-99-99", b"\\u0000", b"../", b"%s", b"__metadata__"]

Edits = list[tuple[int, int, bytes]]
EDITS: st.SearchStrategy[Edits] = st.lists(
    st.tuples(
        st.integers(0, 1 << 16), st.integers(0, 40), st.sampled_from(PIECES) | st.binary(max_size=6)
    ),
    min_size=1,
    max_size=5,
)  # fmt: skip


def edited(data: bytes, edits: Edits) -> bytes:
    """The document with pieces in place of others."""
    for place, length, piece in edits:
        place %= len(data) + 1
        data = data[:place] + piece + data[place + length :]
    return data


WORDS = st.text(max_size=12) | st.sampled_from(
    ["", "nan", "1_0", "-0", "all", "public", "../x", "a" * 400, "\n", "\0"]
)
NUMBERS = st.integers() | st.floats() | st.sampled_from([10**400, -1, 0, 1, 2**31, 2**63])
PLAIN = st.none() | st.booleans() | NUMBERS | WORDS
# Whatever JSON, TOML or YAML can hold.
VALUES: st.SearchStrategy[Any] = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=8,
)


def one_line(error: Exception, longest: int = 2000) -> None:
    """What every error of ours is."""
    text = str(error)
    assert text and "\n" not in text and len(text) <= longest, text
