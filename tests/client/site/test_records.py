"""What crosses between the process that runs the app and the one that writes the audit log: data, never code."""

from __future__ import annotations

import io
import json
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict

from client.site.runtime.records import (
    InvalidAnswerError,
    read_answer,
    read_question,
    write_answer,
    write_question,
)
from server.simulation.engine import flower_identity

ROOT = Path(__file__).parents[3]
PARTS = ("models", "partitions", "strategies", "client", "server")


@pytest.fixture(autouse=True)
def identity() -> Iterator[None]:
    with flower_identity():
        yield


def content(value: float = 1.5) -> RecordDict:
    vector = ArrayRecord({"vector": Array(np.array([value, -0.0, np.inf], dtype=np.float32))})
    return RecordDict(
        {
            "model": vector,
            "config": ConfigRecord({"round": 3, "exact": True, "names": ["a", "b"]}),
        }
    )


def message() -> Message:
    return Message(content(), dst_node_id=7, message_type="train")


def written(write: object, *arguments: object) -> io.BytesIO:
    file = io.BytesIO()
    write(file, *arguments)  # type: ignore[operator]
    return file


def test_a_question_arrives_as_it_was_asked() -> None:
    asked = message()
    known = Context(
        11,
        7,
        {"name": "clinic"},
        content(2.5),
        {"rounds": 3, "learning-rate": 0.1, "resume": False},
    )
    head, read, same = read_question(written(write_question, {"fab": ["a", "1"]}, asked, known))
    assert head["fab"] == ["a", "1"]
    assert read.content == asked.content and vars(read.metadata) == vars(asked.metadata)
    assert (same.run_id, same.node_id, same.node_config) == (11, 7, {"name": "clinic"})
    assert same.state == known.state and same.run_config == known.run_config
    assert {key: type(value) for key, value in same.run_config.items()} == {
        "rounds": int,
        "learning-rate": float,
        "resume": bool,
    }


def test_the_worker_makes_the_reply_from_content_or_error_alone() -> None:
    """Whose reply it is, and to whom it goes, the app's process has no say in."""
    asked = message()
    forged = Message(content(4.0), dst_node_id=99, message_type="query")
    known = Context(11, 7, {}, RecordDict(), {})
    reply = read_answer(written(write_answer, forged, content(2.5)), asked, known)
    assert reply.content == content(4.0) and known.state == content(2.5)
    assert reply.metadata.message_type == "train"
    assert reply.metadata.reply_to_message_id == asked.metadata.message_id
    failed = Message(Error(2, "no such column"), reply_to=asked)
    reply = read_answer(written(write_answer, failed, RecordDict()), asked, known)
    assert (reply.error.code, reply.error.reason) == (
        2,
        "no such column",
    ) and known.state == content(2.5)


class Trap:
    """Runs code where it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (Path("executed"),)


def head(**values: object) -> bytes:
    text = json.dumps(values).encode()
    return len(text).to_bytes(8, "big") + text


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        pickle.dumps(Trap()),
        head(sizes=[2**40]) + b"x",
        head(sizes=[-1, 1]) + b"x",
        head(sizes=[1]) + b"\xff",
        head(sizes=[]),
        head(sizes=[0, 0, 1]) + b"x",
        head(sizes=[], error={"code": "x", "reason": 1}),
        head(raised="no sizes"),
        b"\xff" * 64,
    ],
)
def test_an_answer_of_bad_intent_is_an_error(
    answer: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidAnswerError, match="wrote no valid answer"):
        read_answer(io.BytesIO(answer), message(), None)
    assert not Path("executed").exists()


def test_nothing_is_pickled_anywhere() -> None:
    """But published files: CIFAR's, with stand-ins for all that a pickle can call, and tables of a known SHA-256."""
    sources = [path for part in PARTS for path in (ROOT / part).rglob("*.py")]
    imports = re.compile(
        r"^\s*(import|from) (pickle|marshal|shelve|dill|cloudpickle)\b", re.MULTILINE
    )
    users = {
        path.relative_to(ROOT).as_posix()
        for path in sources
        if imports.search(path.read_text("utf-8"))
    }
    assert users == {"partitions/datasets/pickles.py", "partitions/datasets/centres.py"}
