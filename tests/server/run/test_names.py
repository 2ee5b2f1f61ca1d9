"""A name belongs to a key: an impostor under another hospital's name is refused and named, and the others go on."""

from __future__ import annotations

import json
import re

import pytest
from flwr.app import Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from representatives import sampled
from resuming import crash_after, interrupted
from tiny import comparable, events_of, federate, round_of, rows_of, same, write_silo

from client.protocol.envelope import fingerprint
from server.run.registration.data_summaries import IdentityRegistry, ImpostorError
from server.simulation.engine import flower_identity

# Methods whose server keeps a model per silo: these took an impostor's for the absent hospital's and gave it that one.
KEEP_MODELS = ["fedamp", "heurfedamp", "diversifed", "fedfomo"]


def pem(word):
    return f"-----BEGIN PUBLIC KEY-----\n{(word * 8)[:8]}\n-----END PUBLIC KEY-----\n".encode()


def registered(keys, names=None):
    """For ``prepare``: a SuperLink's table. Files are called as silos are registered; ``names`` is what they say."""

    def prepare(grid):
        nodes = []
        for number, context in grid.contexts.items():
            own = str(context.node_config["name"])
            name, key = keys[own]
            context.node_config["name"] = (names or {}).get(own, own)
            public = pem(key) if key else b""
            nodes.append(NodeInfo(node_id=number, name=name, public_key=public))
        grid.get_nodes = lambda: nodes

    return prepare


def own_keys(*names):
    return {name: (name, f"key{name}") for name in names}


@pytest.fixture
def intruder(three, tmp_path):
    """a and c, and x, who is registered as x with a key and data of its own."""
    x, y = rows_of(three["b"])
    return {
        "a": three["a"],
        "c": three["c"],
        "x": write_silo(tmp_path / "x.npz", 3 * x, list(y[::-1]), 3),
    }


def test_a_name_is_for_the_node_that_it_is_registered_with():
    """Without a run: the one place that decides, before any run waits for silos that it refuses."""
    identities = IdentityRegistry()
    identities.update(
        [NodeInfo(node_id=i, name=name, public_key=pem(name)) for i, name in enumerate("ab")]
    )
    identities.check(0, "a")
    with pytest.raises(
        ImpostorError, match="node 1 calls itself a, and its key is registered as b"
    ):
        identities.check(1, "a")


def test_a_hospital_that_left_is_known_by_its_key(three, tmp_path):
    """b joins, is removed and registered again: its name is another key's in this run, which goes on without it."""

    def prepare(grid):
        registered(own_keys(*"abc"))(grid)
        nodes, seen, b = list(grid.get_nodes()), [0], list(three).index("b") + 1
        again = NodeInfo(node_id=99, name="b", public_key=pem("another"))
        grid.contexts[99] = grid.contexts[b]
        first = [n for n in nodes if n.node_id != b]

        def before(name, message, context):
            seen[0] = max(seen[0], round_of(message))

        grid.before = before
        grid.get_nodes = lambda: [first, nodes, [*first, again]][min(seen[0], 2)]

    out = tmp_path / "run"
    options = {"rounds": 4, "silos": 3, "min_silos": 2, "late_joiners": "any"}
    run = federate(three, strategy="fedavg", directory=out, prepare=prepare, **options)
    told = [
        json.loads(line).get("message")
        for line in (out / "progress.jsonl").read_text().splitlines()
    ]
    assert "b joins the run, and takes part from round 2 on" in told
    assert (
        "b is here with another key than this run knows it by: it takes part in new runs only"
        in told
    )
    assert [
        m.metadata.message_type for m, _ in run.grid.traffic if m.metadata.dst_node_id == 99
    ] == ["query"]


@sampled("method", KEEP_MODELS, 2)
def test_an_impostor_does_not_take_an_absent_hospitals_place(
    three, intruder, tmp_path, method, caplog
):
    """Three rounds of a, b, c; then b is away and x says that it is b. It gets no message, and its word counts nothing:
    the run is what it is where b is just away.
    """
    options = {"strategy": method, "rounds": 3}
    keys = own_keys(*"abcx")
    for place in ("attacked", "away"):
        interrupted(
            three, tmp_path / place, watch=crash_after(2), prepare=registered(keys), **options
        )
    again = {**options, "resume": True, "min_silos": 2, "round_timeout": 1.0, "silos": 3}
    attack = registered(keys, {"x": "b"})
    attacked = federate(intruder, directory=tmp_path / "attacked", prepare=attack, **again)
    x = next(
        n
        for n, c in attacked.grid.contexts.items()
        if str(c.node_config["data"]).endswith("x.npz")
    )
    assert [
        m.metadata.message_type for m, _ in attacked.grid.traffic if m.metadata.dst_node_id == x
    ] == ["query"]
    assert "calls itself b, and its key is registered as x" in caplog.text
    told = events_of(tmp_path / "attacked")
    assert [e["message"] for e in told if e["event"] == "refused"] == [
        f"node {x} calls itself b, and its key is registered as x"
    ]
    assert {(r.round, r.silo) for r in attacked.rows if r.metric == "rejected"} == {
        (3, "b"),
        (4, "b"),
    }

    here = {name: three[name] for name in "ac"}
    away = federate(here, directory=tmp_path / "away", prepare=registered(keys), **again)
    assert comparable(attacked.rows) == comparable(away.rows)
    for name, array in away.strategy.state.arrays.items():
        assert same(array, attacked.strategy.state.arrays[name])


def test_an_impostor_beside_the_hospital_stops_nobody(three, intruder):
    """Before, two silos of one name ended the run."""
    keys = own_keys(*"abcx")
    files = {**three, "x": intruder["x"]}
    run = federate(
        files, strategy="fedavg", rounds=1, silos=3, prepare=registered(keys, {"x": "b"})
    )
    assert list(run.strategy.silos) == [
        "a",
        "b",
        "c",
    ] and run.federation.registration.summaries["b"]["n_train"] == len(rows_of(three["b"])[0])
    assert not [r for r in run.rows if r.metric == "rejected"]


def test_an_impostor_is_no_silo_that_is_waited_for(intruder, tmp_path):
    """While the run waits, `silofl run` prints how many are here."""
    with pytest.raises(
        RuntimeError,
        match=r"here are 2: a, c; refused: node 3 calls itself b, and its key is regis",
    ):
        federate(
            intruder,
            strategy="fedavg",
            rounds=1,
            round_timeout=1.0,
            directory=tmp_path / "run",
            prepare=registered(own_keys(*"acx"), {"x": "b"}),
        )
    said = (tmp_path / "run/progress.jsonl").read_text()
    assert "2 of 3 silos are here, and the run waits: silofl status" in said


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (
            {"b": ("b", "another")},
            "node 2 calls itself b, whose key was another one when this run began",
        ),
        (
            {"b": ("", "keyb")},
            "node 2 calls itself b, and its key is registered without a name: remove it and",
        ),
        (
            {"a": ("", "keya"), "b": ("", "keyb"), "c": ("", "keyc")},
            "refused: node 1 calls itself a, and its key is registered without",
        ),
    ],
)
def test_a_resumed_run_remembers_its_silos_keys(three, tmp_path, keys, reason):
    """Across a restart of everything: the name is registered again, but with another key, or no longer at all."""
    options = {"strategy": "fedamp", "rounds": 3, "directory": tmp_path / "run"}
    federate(three, **{**options, "rounds": 1}, prepare=registered(own_keys(*"abc")))
    again = {**options, "resume": True, "round_timeout": 0.1}
    with pytest.raises(RuntimeError, match=reason):
        federate(three, **again, prepare=registered({**own_keys(*"abc"), **keys}))
    run = federate(three, **again, prepare=registered(own_keys(*"abc")))
    assert run.federation.registration.keys == {
        name: fingerprint(pem(f"key{name}")) for name in "abc"
    }


def test_a_silo_that_was_away_keeps_its_key(three, tmp_path):
    """Two resumes: in the first b is away, in the second another key is registered under its name."""
    options = {
        "strategy": "fedamp",
        "directory": tmp_path / "run",
        "round_timeout": 0.1,
        "silos": 3,
    }
    federate(three, **options, rounds=1, prepare=registered(own_keys(*"abc")))
    here = {name: three[name] for name in "ac"}
    federate(
        here, **options, rounds=2, resume=True, min_silos=2, prepare=registered(own_keys(*"ac"))
    )
    other = registered({**own_keys(*"ac"), "b": ("b", "another")})
    run = federate(three, **options, rounds=3, resume=True, min_silos=2, prepare=other)
    assert {(r.round, r.silo) for r in run.rows if r.metric == "rejected"} >= {(3, "b")}


def test_runs_of_the_version_before_and_simulations_know_no_keys(three, tmp_path, caplog):
    """Nothing is registered in a simulation; where only keys are, without names, that is said."""
    run = federate(three, strategy="fedavg", rounds=1, directory=tmp_path / "run")
    assert run.federation.registration.keys == {} and "registered" not in caplog.text
    with_keys = registered(own_keys(*"abc"))
    resumed = federate(
        three,
        strategy="fedavg",
        rounds=2,
        directory=tmp_path / "run",
        resume=True,
        prepare=with_keys,
    )
    assert sorted(resumed.federation.registration.keys) == ["a", "b", "c"]
    unnamed = registered({name: ("", f"key{name}") for name in "abc"})
    assert (
        federate(
            three, strategy="fedavg", rounds=1, prepare=unnamed
        ).federation.registration.keys
        == {}
    )
    assert "registered without names" in caplog.text


def test_two_silos_of_one_name_where_none_is_registered(three):
    same_name = registered(dict.fromkeys("abc", ("", "")), {"c": "b"})
    run = federate(three, strategy="fedavg", rounds=1, prepare=same_name)
    assert list(run.strategy.silos) == ["a", "b"]
    assert "it is called b, as node 2 is" in run.federation.registration.left_out["node 3"]


def test_no_message_has_an_id_that_another_silo_could_work_out(three):
    """The id is a hash of the message, and every silo gets the same: what differs is drawn at random."""
    run = federate(three, strategy="fedavg", rounds=2)
    words = [message.metadata.group_id for message, _ in run.grid.traffic]
    assert len(set(words)) == len(words) and all(
        re.fullmatch(r"[0-9a-f]{32}-\d+", word) for word in words
    )
    with flower_identity():
        one, two = (
            Message(RecordDict(), dst_node_id=5, message_type="train", group_id=word)
            for word in words[:2]
        )
    two.metadata.__dict__["_created_at"] = one.metadata.created_at
    assert one.object_id != two.object_id


def test_a_fingerprint_is_the_keys_not_the_files():
    key = b"-----BEGIN PUBLIC KEY-----\nTUlJ\nQ2dL\n-----END PUBLIC KEY-----\n"
    assert (
        fingerprint(key) == fingerprint(key.replace(b"\n", b"\r\n")) == fingerprint(key.strip())
    )
    assert (
        fingerprint(key)
        == fingerprint(key.replace(b"TUlJ\nQ2dL", b"TUlJQ2dL"))
        != fingerprint(pem("other"))
    )
