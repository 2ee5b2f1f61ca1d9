"""A silo's masked vector depends on what all silos of the sum agree on, its data and its record; on no other word."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from typing import Any

import pytest
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from representatives import product, some
from secured import Secured, absent, close, go, received_by
from tiny import TinyGrid, random_silos

from client.protocol.receipts import ASKED
from client.protocol.secure import RECORD, UNMASK
from client.site.record import close_records
from partitions.common.errors import RunFailedError
from strategies import strategies
from strategies.base.info import Sums

METHODS = sorted(
    name
    for name, method in strategies().items()
    if method.info.aggregation.sums and method.info.uploads
)
SIZES = {"a": 6, "b": 11, "c": 8, "d": 7, "e": 9, "f": 5}
# What a server could say of one silo, and honest messages of these runs do not
MORE: dict[str, Any] = {
    "attended": 9,
    "reported": 0,
    "state_lost": 9,
    "secure_sum": "x",
    ASKED: "y",
}


@pytest.fixture(autouse=True)
def _records():
    yield
    close_records()


def settings_of(method: str) -> dict[str, Any]:
    """The settings with which a method has sums."""
    sums = strategies()[method].info.aggregation.sums
    at = sums.at if isinstance(sums, Sums) else {}
    own: dict[str, Any] = {f"{method}.{key}": values[0] for key, values in at.items()}
    need: dict[str, dict[str, Any]] = {
        "fedbn": {"model": "tiny-bn"},
        "fedsa-lora": {"lora_rank": 2},
    }
    own |= need.get(method, {})
    return {"mlp__hidden": "4", "strategy": method, "rounds": 3, **own}


def others_of(value: Any) -> list[Any]:
    """Other values in a word's place."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [0 * value, value + 1, -value]
    if isinstance(value, str):
        return ["", value + "0"]
    return [value[:-1], [*value, *value[:1]]]


def copied(message: Message) -> Message:
    made = copy(message)
    records = message.content.items()
    made.content = RecordDict(
        {k: ConfigRecord({**r}) if isinstance(r, ConfigRecord) else r for k, r in records}
    )
    return made


def variants(message: Message) -> Iterator[tuple[str, Message]]:
    """Messages with one word changed, dropped or added, and which."""
    for name in ("config", RECORD):
        given: Any = message.content[name]
        for key in {**given, **(MORE if name == "config" else {})}:
            value = given.get(key, MORE.get(key))
            added = [] if key in given else [value]
            for other in [*added, *others_of(value), None]:
                changed = copied(message)
                record: Any = changed.content[name]
                if other is not None:
                    record[key] = other
                elif key in record:
                    del record[key]
                yield f"{name}.{key} = {other!r:.60}", changed
    for name, record in (
        ("more", ConfigRecord({"counted": 0})),
        ("sizes", MetricRecord({"n": 1})),
    ):
        changed = copied(message)
        changed.content[name] = record
        yield name, changed


class Replayed:
    """For ``prepare``: one silo gets its message of a round again and again, with one word changed."""

    def __init__(self, secured: Secured, silo: str, number: int) -> None:
        self.secured, self.of = secured, (silo, number)
        self.same, self.refused = set[str](), set[str]()

    def __call__(self, grid: TinyGrid) -> None:
        self.secured(grid)
        inner: Any = grid.app

        def app(message: Message, context: Any) -> Message:
            if grid.key_of(message) != self.of or message.metadata.message_type != "train":
                return inner(message, context)
            changed, found = [*variants(message)], received_by(message)
            first = inner(copied(message), context)
            vector = first.content["masked"]["sum"].data
            for word, other in changed:
                if received_by(other) != found:
                    continue  # a word of the digest: the masks are others
                reply = inner(other, context)
                if reply.has_error():
                    assert "another vector" not in reply.error.reason, word
                    self.refused.add(word.partition(" ")[0])
                else:
                    assert reply.content["masked"]["sum"].data == vector, word
                    self.same.add(word.partition(" ")[0])
            return inner(message, context)

        grid.app = app  # type: ignore[assignment]


@some("method", METHODS, {"scaffold", "fedper", "fedbn"}.__contains__)
def test_no_word_beside_the_digest_changes_a_masked_vector(tmp_path, method, tiny_bn):
    """In round 3, when silos have a state. It is the same bit for bit, or nothing leaves."""
    six = random_silos(tmp_path, SIZES)
    replayed = Replayed(Secured(tmp_path, six), "c", 3)
    go(six, tmp_path, replayed, **settings_of(method))
    config = {"counted", "attended", "reported", "state_lost", "secure_sum", ASKED}
    assert {f"config.{word}" for word in config} | {"more", "sizes"} <= replayed.same
    assert {f"{RECORD}.sums", f"{RECORD}.statements", f"{RECORD}.round"} <= replayed.refused


@product(kind=["train", UNMASK], method=["fedper", "scaffold", "fedapm"])
def test_what_a_silo_keeps_is_of_sums_that_it_is_in(tmp_path, method, kind):
    """A training whose vector is in no sum leaves no trace; one that is in a sum counts, whether asked for or not.

    Else a server could choose one silo's next step: in two sums over the same silos, the difference would be its own.
    """
    six = random_silos(tmp_path, SIZES)
    secured, missed = Secured(tmp_path, six), {2} if kind == "train" else set[int]()
    way = "lost" if kind == "train" else "gone"
    setattr(secured, way, lambda *of: of == ("f", kind, 2))
    changes = {**settings_of(method), "rounds": 4}
    close(go(six, tmp_path, secured, **changes), go(six, tmp_path, absent(missed), **changes))


def test_a_server_that_lies_about_an_earlier_sum_gets_none(tmp_path):
    """That f was not in it: f would go on from another state, and all else stay as it is. Nobody answers."""
    six = random_silos(tmp_path, SIZES)
    secured = Secured(tmp_path, six)

    def prepare(grid: TinyGrid) -> None:
        secured(grid)
        inner: Any = grid.app

        def lie(message: Message, context: Any) -> Message:
            record: Any = message.content.get(RECORD, {})
            if sums := record.get("sums"):
                record["sums"] = [*sums[:-1], sums[-1].removesuffix(" f")]
            return inner(message, context)

        grid.app = lie  # type: ignore[assignment]

    silos = " ".join(
        rf"{name}: {name} refuses: [^;]* was summed over other silos before[^;]*;?"
        for name in SIZES
    )
    with pytest.raises(
        RunFailedError, match=f"^round 2: no silo sent a usable update .{silos}"
    ):
        go(six, tmp_path, prepare, **settings_of("scaffold"))
