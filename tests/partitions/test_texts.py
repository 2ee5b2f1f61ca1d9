"""Texts of others: bounded before they are parsed, and what is not data is refused in one line, at once."""

from __future__ import annotations

import json
import time
import tomllib
from typing import Any

import pytest
from failing import fails
from hypothesis import given
from hypothesis import strategies as st
from study_text import study_text
from taken import silofl

from client.protocol.envelope import SIGNATURE, signer_of
from client.protocol.parsed import SiteError
from client.protocol.policy import parse_policy, read_policy
from client.protocol.study import parse_study
from partitions.common.parsed import DEEPEST, MOST_TEXT, parse_json, parse_toml
from partitions.recipes.pictures import load_any, read_any
from partitions.schema import load_schema, read_schema
from server.deploy.control import _entries
from server.deploy.federation import read_federation
from server.results.run_directory import read_toml
from strategies.base.transport.data_summary import read_agreed

DOTS = ".b" * 50_000
# A parser of ours must not take a key for a text, or for a comment, where TOML does not
KEYS = [
    f"a{DOTS} = 1",
    f"[a{DOTS}]",
    f"[[a{DOTS}]]",
    "[a" + " . b" * 50_000 + "]",
    '","' + '.","' * 50_000 + " = 1",
    "'\"'" + ".'\"'" * 50_000 + " = 1",
    '"a\\""' + '."\\\\"' * 50_000 + " = 1",
    f"a = 'x' # '''\nb{DOTS} = 1 # '",
    f'a = "\\\\"\nb{DOTS} = 1 # "',
    f'a = ["""x"""", {{b{DOTS} = 1}}] # "',
    f"x = '''a''''\nb{DOTS} = 1 # '",
    f'a = """\\""""\nb{DOTS} = 1 # """',
    f'a = """x\n""" # "\nb{DOTS} = 1 # "',
    "a = " + "[" * 100_000,
    "a = " + "{b = " * 100_000,
]


def quickly(call, *given):
    """Fails in one line, before squares of time."""
    begun = time.monotonic()
    said = fails(ValueError, None, call, *given)
    assert time.monotonic() - begun < 5
    return said


@pytest.mark.parametrize("text", KEYS, ids=lambda text: repr(text[:24]))
def test_long_keys_and_deep_tables_are_refused_before_they_are_parsed(text):
    """tomllib needs squares of time for a key of 50,000 parts: a minute of a hospital's processor for 100 kB."""
    assert quickly(parse_toml, text) == f"it is nested deeper than {DEEPEST} levels"


@pytest.mark.parametrize(
    "text",
    [
        '"""' * 99_999,
        "'''x" * 99_999,
        '"\\' * 99_999,
        'a="""' + '\\"""' * 99_999,
        "#" * 999_999,
    ],
    ids=lambda text: repr(text[:12]),
)
def test_the_bound_itself_takes_no_squares_of_time(text):
    begun = time.monotonic()
    for parse in (parse_toml, parse_json):
        try:
            parse(text)
        except ValueError:
            continue
    assert time.monotonic() - begun < 5


WORDS = st.sampled_from(
    ["a", ".", '"', "'", "\\", "#", "\n", "=", "[", "]", "{", "}", ",", "1", '"""', "'''", " "]
)


@given(st.lists(WORDS, max_size=30).map("".join))
def test_what_the_bound_lets_pass_is_shallow(text):
    """With a bound of three: a text of TOML that passes has no deeper table, and a shallow one passes."""
    try:
        content = tomllib.loads(text)
    except ValueError:
        return

    def depth(value):
        inner = (
            value.values()
            if isinstance(value, dict)
            else value
            if isinstance(value, list)
            else ()
        )
        return (value is not content) + max(map(depth, inner), default=0)

    if depth(content) * 2 < DEEPEST:
        assert parse_toml(text) == content


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("a = [" + "0.1, " * 5000 + "]", {"a": [0.1] * 5000}),
        (f'a = "{"no. " * 5000}"', {"a": "no. " * 5000}),
        (f"# {'...' * 99}\na = 1.5e3", {"a": 1500.0}),
        (
            f'a = """\n{"x.y" * 99}\n"""\nb.c.d = 1',
            {"a": "x.y" * 99 + "\n", "b": {"c": {"d": 1}}},
        ),
    ],
)
def test_dots_of_numbers_texts_and_comments_are_none_of_a_key(text, content):
    assert parse_toml(text) == content


BRACKETS, DIGITS = "[" * 100_000, "1" * 100_000
READERS: dict[str, tuple[Any, ...]] = {
    "policy": (parse_policy, "p.toml"),
    "study": (parse_study, "s.toml"),
    "signature": (lambda text: signer_of(f"a = 1\n{SIGNATURE}{text}"),),
}


@pytest.mark.parametrize("what", READERS)
@pytest.mark.parametrize(
    "text",
    [KEYS[0], f"a = {BRACKETS}", f"a = {DIGITS}", f"a = 0x{DIGITS}"],
    ids=["key", "[", "1", "0x1"],
)
def test_a_hospitals_own_process_refuses_it(what, text):
    call, *path = READERS[what]
    begun = time.monotonic()
    assert len(fails(SiteError, None, call, text, *path)) < 400
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize(
    "text", [BRACKETS, DIGITS, '{"a": ' * 50_000, '"\\ud800"', f'{{"classes": {DIGITS}}}']
)
@pytest.mark.parametrize("read", [parse_json, read_agreed, read_any, read_schema])
def test_a_setting_in_json(read, text):
    """Brackets, digits and half characters, in `agreed`, a recipe and a schema: one line."""
    assert len(quickly(read, text)) < 400


@pytest.mark.parametrize("text", ['"\\ud800"', '{"\\udfff": 1}', '["x\\ud83d"]'])
def test_half_a_character_is_no_text(text):
    assert "half a character, a lone surrogate" in quickly(parse_json, text)
    assert parse_json('"\\ud83d\\ude00"') == "\U0001f600"


def test_json_is_read_as_json_reads_it():
    content = {"a": [1, 2.5, None, True, 'x.y[{\\"'], "b": {"c": [[[]]]}, "d": "#'"}
    assert (
        parse_json(json.dumps(content)) == parse_json(json.dumps(content).encode()) == content
    )
    quickly(parse_json, b'"\xff"')


FILES = [
    (read_policy, "policy.toml", str),
    (load_any, "recipe.toml", None),
    (load_schema, "schema.toml", None),
    (load_schema, "schema.yaml", None),
    (load_schema, "schema.json", None),
    (read_federation, "federation.yaml", None),
    (read_toml, "config.toml", None),
    (_entries, "flower.toml", None),
]


@pytest.mark.parametrize(("read", "name", "kind"), FILES, ids=[name for _, name, _ in FILES])
def test_a_file_of_100_mb_is_not_read(read, name, kind, tmp_path):
    """Of a file that is too long, no more is read than is allowed. 100 MB of comment are valid TOML and YAML."""
    file = tmp_path / name
    with file.open("wb") as out:
        out.write(b"#")
        out.truncate(100_000_000)
    said = quickly(read, kind(file) if kind else file)
    assert "bytes, which no such file has" in said and str(file) in said


def test_the_commands_of_a_study_read_no_more(tmp_path, capsys):
    """Exit code 2 and one line, also for a file that is not in UTF-8."""
    file = tmp_path / "study.toml"
    for content in (
        b"#" * (MOST_TEXT + 1),
        study_text(purpose="\xe4").encode("latin-1"),
        KEYS[0].encode(),
    ):
        file.write_bytes(content)
        for command in ("show", "check", "sign"):
            assert silofl("study", command, file) == 2
            said = capsys.readouterr()
            assert str(file) in said.err and said.err.count("\n") == 1 and not said.out


def test_a_study_of_usual_length_is_read(tmp_path, capsys):
    file = tmp_path / "study.toml"
    file.write_text(study_text())
    assert silofl("study", "show", file) == 0 and "heart" in capsys.readouterr().out
