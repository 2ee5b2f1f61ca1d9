"""Secure aggregation at the gate: what the SuperNode answers itself, and what never leaves."""

from __future__ import annotations

import weakref
from typing import Any, cast

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from secured import received_by
from study_text import study_text

from client.protocol.envelope import fingerprint, public_pem
from client.protocol.keys import new_key, write_key
from client.protocol.methods import DEFAULTS
from client.protocol.parsed import SiteError
from client.protocol.secure import ARRAY, ARRAYS, KEYS, RECORD, START, UNMASK, masks
from client.protocol.secure.statements import read_statement
from client.protocol.secure.unmasking import open_sum
from client.protocol.study import parse_study
from client.site import release
from client.site.budget.ledger import SpentEpsilon
from client.site.gate import pass_gate
from client.site.message import SiteMessage
from client.site.record import close_records
from client.site.rules import budget
from client.site.secure.gate import KEY
from client.site.study import approvals
from client.site.trust import audit, audit_page
from server.simulation.engine import flower_identity

APP, RUN = "ab" * 32, 9
NAMES = ["north", "south", "west"]
MODEL = np.ones(4, np.float32)


class Hospital:
    """A silo's folder, and the one way to it: a message through its gate."""

    def __init__(self, folder, name):
        self.folder, self.name, self.state = folder, name, folder / "state"
        folder.mkdir()
        key = new_key()
        write_key(folder / "node.key", key)
        self.fingerprint = fingerprint(public_pem(key))
        self.run: dict[str, Any] = {**DEFAULTS, "study": "heart", "secure-aggregation": True}
        self.seen: list[Message] = []
        self.policy()

    def policy(self, **rules):
        lines = {"secure-peers": "2", **{k.replace("_", "-"): v for k, v in rules.items()}}
        text = "".join(f"{name} = {value}\n" for name, value in lines.items())
        (self.folder / "policy.toml").write_text(text)

    def ask(self, kind, record=None, reply=RecordDict, run=RUN, **config):
        """The reply to a message. ``reply``: what the app answers."""
        config = {"round": 1, "participants": 3, "run": "today", **config}
        content = RecordDict({"config": ConfigRecord(config)})
        content["model.global"] = ArrayRecord({"vector": Array(MODEL)})
        if record is not None:
            content[RECORD] = ConfigRecord(dict(record))
        node = {
            "name": self.name,
            "data": str(self.folder / "data.npz"),
            "policy": str(self.folder / "policy.toml"),
            "state-dir": str(self.state),
        }
        with flower_identity(), pytest.MonkeyPatch.context() as patch:
            patch.setenv(KEY, str(self.folder / "node.key"))
            message = Message(content, dst_node_id=1, message_type=kind)
            context = Context(run, 1, node, RecordDict(), self.run)

            def answer(terms):
                self.seen.append(message)
                return Message(reply(), reply_to=message)

            return pass_gate(message, context, APP, answer, lambda: [APP])

    def entries(self):
        return audit.verify_log(self.state / "audit").entries


def secure_of(reply):
    assert not reply.has_error(), reply.error.reason
    return dict(reply.content[RECORD])


def reason(reply):
    assert reply.has_error()
    return str(reply.error.reason)


def vector_of(reply):
    assert not reply.has_error(), reply.error.reason
    return reply.content.array_records[ARRAYS][ARRAY].numpy()


def integers(values):
    return lambda: RecordDict({ARRAYS: ArrayRecord({ARRAY: Array(values)})})


@pytest.fixture
def hospitals(tmp_path, monkeypatch):
    monkeypatch.setitem(DEFAULTS, "secure-aggregation", False)
    made = {name: Hospital(tmp_path / name, name) for name in NAMES}
    peers = "".join(f'{n} = "{one.fingerprint}"\n' for n, one in made.items())
    text = study_text(app=APP) + f"[peers]\n{peers}"
    text = text.replace("[settings]\n", "[settings]\nsecure-aggregation = [true, false]\n")
    for name, one in made.items():
        approvals.record_approval(one.state, name, text, "Dr. B", "", [])
    yield made
    close_records()


def begin(hospitals, attempt=1):
    """Each silo's train record of round 1, as an honest server makes them."""
    slot = {"round": 1, "attempt": attempt}
    for one in hospitals.values():
        summary = RecordDict({"summary": ConfigRecord({"n_train": 100})})
        assert not one.ask("query", None, lambda: summary).has_error()  # noqa: B023
        one.seen.clear()
    texts = [secure_of(hospitals[n].ask(KEYS, slot))["statement"] for n in NAMES]
    start = {**slot, "statements": texts}
    offers = {n: secure_of(hospitals[n].ask(START, start)) for n in NAMES}
    return {
        name: {
            **slot,
            "statements": [offers[n]["statement"] for n in NAMES],
            "sealed": [offers[n]["sealed"][place] for n in NAMES],
        }
        for place, name in enumerate(NAMES)
    }


def test_a_round_leaves_masked_and_its_sum_is_opened(hospitals):
    records = begin(hospitals)
    assert not any(one.seen for one in hospitals.values())  # no app was asked
    vectors = {n: np.arange(4, dtype=np.uint32) + i for i, n in enumerate(NAMES)}
    masked = {
        n: hospitals[n].ask("train", records[n], integers(vectors[n]), secure_share=1 / 3)
        for n in NAMES
    }
    assert all((vector_of(masked[n]) != vectors[n]).any() for n in NAMES)
    assert all(RECORD not in one.seen[0].content for one in hospitals.values())
    slot = {"round": 1, "attempt": 1, "survivors": NAMES}
    answers = {n: secure_of(hospitals[n].ask(UNMASK, slot))["shares"] for n in NAMES}
    one, record = hospitals["north"], records["north"]
    listed = {
        n: read_statement(t, [records[to]["sealed"][place] for to in NAMES])
        for place, (n, t) in enumerate(zip(NAMES, record["statements"], strict=True))
    }
    context = masks.context(
        received_by(one.seen[0]), one.run, {n: listed[n].samples for n in NAMES}, listed
    )
    total = np.add.reduce([vector_of(masked[n]) for n in NAMES], dtype=np.uint32)
    found, false = open_sum(total, listed, NAMES, NAMES, context, answers)
    assert not false and (found == np.add.reduce([vectors[n] for n in NAMES])).all()
    lines = [(line["asked"], line.get("secure")) for line in one.entries()[2:]]
    assert lines == [
        (KEYS, {"round": 1, "attempt": 1}),
        (START, {"round": 1, "attempt": 1}),
        ("train", {"round": 1, "attempt": 1, "silos": 3}),
        (UNMASK, {"round": 1, "attempt": 1, "survivors": 3, "gone": []}),
    ]
    page = audit_page.page(one.entries(), one.entries()[0]["time"][:7])
    assert "masked    1 rounds, 1 sums over 3 silos; 0 repeated\n" in page
    logged = one.entries()[4]["sent"][0]["sha256"]
    assert logged == audit.digest(masked["north"].content.array_records[ARRAYS][ARRAY].data)


@pytest.mark.parametrize("key", ["participants", "number.scale", "evaluate"])
def test_another_number_for_one_silo_gives_noise(hospitals, key):
    """A server could send numbers with which all silos but one make no step; the sum would be that one's."""
    records, left = begin(hospitals), []
    for name in NAMES:
        changed = {key: 9} if name == "south" else {key: 3}
        hospitals[name].ask(
            *("train", records[name], integers(np.zeros(64, np.uint32))),
            **{"secure_share": 1 / 3, "reported": len(name), **changed},
        )
        found = received_by(hospitals[name].seen[0])
        left.append(found)
    assert left[0] == left[2] and left[0] != left[1]
    arrays = [one.partition(":")[0] for one in left]
    assert len({*arrays}) == 1  # the question of a sum is the model alone


def test_a_masked_message_is_gone_with_its_last_reference(hospitals, no_search):
    one, record = hospitals["north"], begin(hospitals)["north"]
    reply = one.ask("train", record, integers(np.zeros(4, np.uint32)), secure_share=1 / 3)
    contents = [weakref.ref(each.content) for each in (*one.seen, reply)]
    one.seen.clear()
    del reply
    assert len(contents) == 2 and not any(content() for content in contents)


@pytest.mark.parametrize(
    ("name", "reply", "says"),
    [
        ("floats", integers(np.ones(4, np.float32)), "is float32 and not uint32"),
        ("none", RecordDict, "the arrays none"),
        (
            "one more",
            lambda: RecordDict(
                {
                    ARRAYS: ArrayRecord({ARRAY: Array(np.ones(4, np.uint32))}),
                    "model.global": ArrayRecord({"vector": Array(MODEL)}),
                }
            ),
            "masked, model.global",
        ),
        (
            "beside it",
            lambda: RecordDict(
                {ARRAYS: ArrayRecord({ARRAY: Array(np.ones(4, np.uint32)), "x": Array(MODEL)})}
            ),
            "only masked is masked",
        ),
    ],
)
def test_a_vector_without_masks_does_not_leave(hospitals, name, reply, says):
    record = begin(hospitals)["north"]
    answered = hospitals["north"].ask("train", record, reply, secure_share=1 / 3)
    assert says in reason(answered) and name
    assert hospitals["north"].entries()[-1]["sent"][0]["name"] == "error"


def test_the_rule_required_keeps_every_other_vector(hospitals):
    north = hospitals["north"]
    north.policy(secure_aggregation='"required"')
    north.run = {**north.run, "secure-aggregation": False}
    plain = lambda: RecordDict({"model.global": ArrayRecord({"vector": Array(MODEL)})})  # noqa: E731
    assert "the run secure-aggregation = false" in reason(north.ask("train", None, plain))
    north.run = {**north.run, "secure-aggregation": True, "evaluate-every": 1}
    rounds = int(north.run["rounds"]) + 1
    reply = north.ask("evaluate", None, plain, round=rounds)
    assert "none leaves without a mask" in reason(reply)
    north.policy(secure_aggregation='"off"')
    assert "the run secure-aggregation = true" in reason(north.ask(KEYS, {}))
    north.policy(secure_group="2")
    assert "secure-group" in reason(north.ask(KEYS, {})) and not north.seen[1:]


def test_a_run_needs_a_study_that_names_this_key(hospitals):
    north, slot = hospitals["north"], {"round": 1, "attempt": 1}
    north.run["study"] = ""
    assert "needs a study, approved here" in reason(north.ask(KEYS, slot))
    north.run["study"] = "heart"
    (north.folder / "node.key").unlink()
    assert "its key cannot be read" in reason(north.ask(KEYS, slot))
    write_key(north.folder / "node.key", new_key())
    assert "and this silo's key is SHA256:" in reason(north.ask(KEYS, slot))
    north.run["secure-aggregation"] = False
    assert "a message asks for it" in reason(north.ask(KEYS, slot))


def test_a_held_out_hospital_needs_no_key(tmp_path):
    """It is evaluated and trains nothing; its data summary leaves as in other runs."""
    east = Hospital(tmp_path / "east", "east")
    text = study_text(app=APP).replace(
        "[settings]\n", 'held-out = ["east"]\n[settings]\nsecure-aggregation = true\n'
    )
    approvals.record_approval(east.state, "east", text, "Dr. B", "", [])
    assert not east.ask("query").has_error()
    assert "held-out = east" in reason(east.ask("train"))
    close_records()


def test_a_study_names_each_key_once():
    one = "SHA256:" + "0" * 64
    with pytest.raises(SiteError, match="names one key twice"):
        parse_study(study_text() + f'[peers]\na = "{one}"\nb = "{one}"\n', "s.toml")
    with pytest.raises(SiteError, match="must be SHA256: and 64"):
        parse_study(study_text() + '[peers]\na = "x"\n', "s.toml")
    many = "".join(f'a{i} = "SHA256:{i:064}"\n' for i in range(101))
    with pytest.raises(SiteError, match="100"):
        parse_study(study_text() + f"[peers]\n{many}", "s.toml")


def test_the_ledger_has_the_reply_without_its_masks(hospitals, monkeypatch):
    """A repeat under other masks is the same reply, and costs nothing more."""
    contents = []

    def noted(reply, message):
        contents.append(message.passage.content)
        return SpentEpsilon(0.0, 0.0, 1e-5)

    charge = budget.Charge(cast(Any, None), 0.0)
    monkeypatch.setattr(SiteMessage, "charged", True)
    monkeypatch.setattr(budget, "charge_message", lambda _: charge)
    monkeypatch.setattr(release, "note_charged", noted)
    left = []
    for attempt in (1, 2):
        record = begin(hospitals, attempt)["north"]
        reply = integers(np.ones(4, np.uint32))
        contents.clear()
        answered = hospitals["north"].ask("train", record, reply, secure_share=1 / 3)
        left.append((vector_of(answered).tobytes(), contents[0]))
    (one, content), (other, same) = left
    assert one != other and content == same != ""


def test_a_message_without_peers_reaches_no_app(hospitals):
    north = hospitals["north"]
    assert "the message's record: the key round is missing" in reason(north.ask("train"))
    record = begin(hospitals)["north"]
    assert "not what the list's samples give" in reason(
        north.ask("train", record, secure_share=1.0)
    )
    assert not north.seen
