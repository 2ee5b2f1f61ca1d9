"""Secure aggregation at the silo: shares, statements, masks, and the four messages."""

from __future__ import annotations

import json
import os
import secrets
import signal
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from forks import in_fork
from secure_ring import RECEIVED, RUN, Ring, fields_of, plain_sum, state
from tiny import json_of

from client.protocol.parsed import SiteError
from client.protocol.secure import masks, shamir
from client.protocol.secure.statements import read_statement, threshold, weights_of
from client.site.record import Record, close_records
from client.site.secure import silo
from client.site.secure.silo import SUM, SecureSilo
from partitions.common.sum_weights import labels_of


@pytest.fixture
def ring(tmp_path):
    made = Ring(tmp_path, 6)
    made.begin()
    return made


# --- primitives -------------------------------------------------------------------------------------------------------


def test_any_threshold_of_shares_gives_the_secret():
    for count, least in ((1, 1), (3, 3), (12, 9), (100, 67)):
        secret = secrets.token_bytes(32)
        shares = dict(enumerate(shamir.split(secret, count, least), 1))
        assert {len(share) for share in shares.values()} == {shamir.SHARE}
        last = {x: shares[x] for x in [*shares][-least:]}
        assert shamir.combine(last) == secret
        if least > 1:
            with pytest.raises(SiteError):
                shamir.combine({x: shares[x] for x in [*last][1:]})


def test_shares_of_a_known_polynomial(monkeypatch):
    """7 + 5 x + 3 x^2 by hand, at x = 1, 2, 3."""
    coefficients = iter((3, 5))
    monkeypatch.setattr(shamir.secrets, "randbelow", lambda most: next(coefficients))
    shares = shamir.split((7).to_bytes(32, "big"), 3, 3)
    assert [int.from_bytes(share, "big") for share in shares] == [15, 29, 49]


def test_a_smaller_field_agrees_with_pycryptodome():
    """PyCryptodome shares 16 bytes in GF(2^128): the same secrets come back by both, from any threshold."""
    other = pytest.importorskip("Crypto.Protocol.SecretSharing").Shamir
    secret = secrets.token_bytes(16)
    theirs = other.split(9, 12, secret)
    ours = dict(enumerate(shamir.split(bytes(16) + secret, 12, 9), 1))
    for xs in (range(1, 10), range(4, 13)):
        assert other.combine([theirs[x - 1] for x in xs]) == secret
        assert shamir.combine({x: ours[x] for x in xs})[16:] == secret


def test_a_mask_is_a_chacha20_stream():
    """The key stream of RFC 8439, A.1, test vector 1: key and nonce of zeros."""
    stream = np.zeros(4, np.uint32)
    masks.add(stream, [(1, bytes(32))])
    assert stream.astype("<u4").tobytes().hex() == "76b8e0ada0f13d90405d6ae55386bd28"
    again = Cipher(ChaCha20(bytes(32), bytes(16)), None).encryptor().update(bytes(16))
    assert stream.tobytes() == again


def test_two_silos_derive_one_pair_seed():
    """X25519 of RFC 7748, 6.1."""
    a = bytes.fromhex("77076d0a7318a57d3c16c17251b26645df4c92f1ebc9a6a2a0b5d6a6c8d2ad9c"[:64])
    b = bytes.fromhex("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb")
    one = masks.pair_seed(a, masks.public_of(b), b"x")
    assert one == masks.pair_seed(b, masks.public_of(a), b"x") != masks.self_seed(a, b"x")
    assert one != masks.pair_seed(b, masks.public_of(a), b"y")


def test_more_than_two_thirds_must_answer():
    assert [threshold(n) for n in (3, 4, 5, 6, 12, 100)] == [3, 3, 4, 5, 9, 67]
    # So a list that is long enough for the study is so for its holders, who are fewer
    assert all(threshold(n) <= threshold(n + 1) for n in range(1, 100))


# --- a round ----------------------------------------------------------------------------------------------------------


def test_the_sum_of_the_survivors_is_opened_in_every_round(ring):
    vectors = ring.vectors()
    for number, gone in ((1, {"clinic-03"}), (2, set()), (3, {"clinic-01"})):
        among = [name for name in ring.names if number == 1 or name != "clinic-03"]
        masked, following = ring.upload(vectors, number, among=among)
        assert all((masked[name] != vectors[name]).any() for name in masked)
        left = [name for name in among if name not in gone]
        total, false = ring.open(masked, left, number)
        assert (total == plain_sum(vectors, left)).all() and not false
        assert bool(following["clinic-02"]) == (number < 3)
        if number < 3:
            ring.holders = among
            ring.offers = {n: following[n] for n in left}


def test_secrets_are_on_the_disk_only_while_a_slot_is_open(ring):
    file = ring.folder / "clinic-01" / "secure" / "clinic-01.json"
    assert file.stat().st_mode & 0o777 == 0o600
    masked, _ = ring.upload(ring.vectors())
    ring.open(masked, ring.names)
    slots = json_of(file)["slots"]
    assert {*slots["7.1.1"]} == {"weights", "holders", "question", "survivors", "answer"}
    assert {*slots} == {"7.1.1", "7.2.1"} and "b" in slots["7.2.1"]
    ring.silo("clinic-01", run="8").note_samples(1)
    ring.silo("clinic-01", run="8").keys({"round": 1, "attempt": 1})
    assert [*json_of(file)["slots"]] == ["8.1.1"]


@pytest.mark.parametrize("what", ["received", "settings"])
def test_another_model_list_or_setting_for_one_silo_gives_noise(ring, what):
    vectors, masked = ring.vectors(64), {}
    for name in ring.names:
        record, received = ring.record(1, 1, ring.names, name), ""
        if name == "clinic-04":
            received = "c" * 64 if what == "received" else received
            ring.settings["learning-rate"] = 0.1 if what == "settings" else 0.01
        else:
            ring.settings["learning-rate"] = 0.01
        masked[name] = vectors[name].copy()
        ring.enter(name, record, received).mask(masked[name])
    ring.settings["learning-rate"] = 0.01
    found, _ = ring.open(masked, ring.names)
    assert (found == plain_sum(vectors, ring.names)).mean() < 0.05


# --- what a silo refuses ----------------------------------------------------------------------------------------------


def refused(ring, record, name="clinic-01"):
    with pytest.raises(SiteError) as error:
        ring.enter(name, record)
    return str(error.value)


def test_a_list_that_isolates_a_silo_is_refused(ring):
    few = ["clinic-01", "clinic-02", "clinic-03", "clinic-04"]
    assert "4 silos of 6 are listed: at least 5" in refused(
        ring, ring.record(1, 1, few, few[0])
    )
    own = ring.record(1, 1, ring.names[1:], "clinic-02")
    with pytest.raises(SiteError, match="lacks this silo's own last statement"):
        ring.silos["clinic-01"].enter(own, RECEIVED, 0.2)


def test_shares_that_other_silos_hold_are_refused(ring):
    """A server that gives one silo a shorter list of holders lowers its threshold."""
    slot, few = {"round": 1, "attempt": 2}, ring.names[1:]
    texts = {name: ring.silos[name].keys(slot)["statement"] for name in ring.names}
    for name in ring.names:
        among = few if name == "clinic-06" else ring.names
        asked = {**slot, "statements": [texts[n] for n in among]}
        ring.offers[name] = ring.silos[name].keys(asked)
    ring.offers["clinic-06"]["sealed"].insert(0, b"")
    record = ring.record(1, 2, ring.names, "clinic-01")
    assert refused(ring, record) == (
        "clinic-06's shares are not with the silos that hold this silo's"
    )


def test_shares_are_sealed_once(ring):
    """Two texts under one key and nonce would tell their difference, and let the server forge a third."""
    slot, one = {"round": 1, "attempt": 2}, ring.silos["clinic-01"]
    texts = [ring.silos[name].keys(slot)["statement"] for name in ring.names]
    first = one.keys({**slot, "statements": texts})
    with pytest.raises(SiteError, match="were made for another list"):
        one.keys({**slot, "statements": texts[:5]})
    assert one.keys({**slot, "statements": texts}) == first


def test_too_few_peers_are_refused(tmp_path):
    ring = Ring(tmp_path, 3, least=3)
    with pytest.raises(SiteError, match="secure-peers = 3, and the list 2 besides"):
        ring.begin()


def test_statements_of_others_are_refused(ring, tmp_path):
    record = ring.record(1, 1, ring.names, "clinic-01")
    strangers = Ring(tmp_path / "sybils", 6)
    strangers.begin()
    texts = record["statements"]

    def instead(text):
        return refused(ring, {**record, "statements": [*texts[:5], text]})

    assert "signed by" in instead(strangers.offers["clinic-06"]["statement"])
    assert "listed twice" in instead(texts[4])
    assert "its signature is wrong" in instead(texts[5].replace("clinic-06", "clinic-05"))
    assert "is no statement (too long)" in instead("x" * 5000)
    first = ring.silos["clinic-06"].keys({"round": 1, "attempt": 1})["statement"]
    assert "clinic-06's shares are not with the silos that hold" in instead(first)
    del ring.peers["clinic-06"]
    assert "'clinic-06' is no peer" in refused(ring, record)
    many = {**record, "statements": ["x"] * 10**6}
    with pytest.raises(SiteError, match="at most 100 items after validation, not 1000000"):
        ring.silos["clinic-01"].enter(many, RECEIVED, 1 / 6)


@pytest.mark.parametrize(
    "change",
    [{"study": "c" * 64}, {"slot": "8.1.1"}, {"slot": f"{RUN}.2.1"}, {"slot": f"{RUN}.1.2"}],
)
def test_keys_of_another_study_run_round_or_attempt_are_refused(ring, change):
    """Each is signed by the right silo, and right in all else."""
    record = ring.record(1, 1, ring.names, "clinic-01")
    one = read_statement(record["statements"][5])

    def stated(**fields):
        text = state(ring.nodes["clinic-06"], **fields_of(one) | fields)
        return {**record, "statements": [*record["statements"][:5], text]}

    assert "another study, run, round or attempt" in refused(ring, stated(**change))
    ring.enter("clinic-01", stated())


@pytest.mark.parametrize("field", ["seal", "mask", "secret", "shares", "holders"])
def test_a_statement_that_lacks_a_field_is_refused(ring, field):
    """The server reads it by the same rules: without the sums of its secrets no fault could be named."""
    record = ring.record(1, 1, ring.names, "clinic-01")
    one = read_statement(record["statements"][5])
    text = state(ring.nodes["clinic-06"], **fields_of(one) | {field: ""})
    texts = [*record["statements"][:5], text]
    assert f"statement 6 of the list: it is no statement: {field} = ''" in refused(
        ring, {**record, "statements": texts}
    )


def test_a_replayed_or_another_rounds_slot_is_refused(ring):
    record = ring.record(1, 1, ring.names, "clinic-01")
    masked, _ = ring.upload(ring.vectors())
    assert "no keys here for round 3" in refused(ring, {**record, "round": 3})
    assert "another study, run, round" in refused(ring, {**record, "round": 2})
    ring.open(masked, ring.names)
    assert "no keys here for round 1" in refused(ring, record)  # a late upload after unmask
    with pytest.raises(SiteError, match="round 1, attempt 1, is over here"):
        ring.silos["clinic-01"].keys({"round": 1, "attempt": 1})
    ring.silos["clinic-01"].keys({"round": 2, "attempt": 2})
    with pytest.raises(SiteError, match="is over here"):
        ring.silos["clinic-01"].keys({"round": 1, "attempt": 3})


def test_the_server_chooses_no_weights(ring):
    record = ring.record(1, 1, ring.names, "clinic-01")
    for bad in (1.0, 0.2, 1, None, "1", float("nan")):
        with pytest.raises(SiteError, match="not what the list's samples give"):
            ring.silos["clinic-01"].enter(record, RECEIVED, bad)


def test_a_method_weighs_in_one_way(tmp_path):
    """From sums of one run with equal weights and with those of samples, single updates could be computed."""
    counts = dict(zip("abcdef", (100, 120, 90, 80, 110, 95), strict=True))
    listed: Any = {name: SimpleNamespace(samples=count) for name, count in counts.items()}
    for run, equal in (
        ({"strategy": "fedavg"}, False),
        ({"strategy": "scaffold"}, True),
        ({"strategy": "fedbn"}, True),
        ({"strategy": "fedbn", "fedbn.average": "samples"}, False),
        ({"strategy": "per-fedavg", "per-fedavg.weighting": "uniform"}, True),
    ):
        found = weights_of(listed, run, labels_of([*counts]))
        assert found == (dict.fromkeys(counts, 1) if equal else counts), run
    ring = Ring(tmp_path, 6)
    ring.settings["strategy"] = "fedavg"
    ring.begin()
    record = ring.record(1, 1, ring.names, "clinic-01")
    assert {*ring.enter("clinic-01", record).entry["weights"].values()} == {100}


def test_a_silo_masks_one_vector_in_a_slot(ring):
    vectors = ring.vectors()
    masked, following = ring.upload(vectors)
    again, same = ring.upload(vectors)  # the message came twice
    assert (again["clinic-01"] == masked["clinic-01"]).all() and same == following
    silo = ring.enter("clinic-01", ring.sent["clinic-01"])
    with pytest.raises(SiteError, match="another vector of round 1 has left"):
        silo.mask(vectors["clinic-01"] + 1)
    with pytest.raises(SiteError, match="another model or list"):
        ring.enter("clinic-01", ring.sent["clinic-01"], "c" * 64)


def test_a_silo_answers_one_set_in_a_slot(ring):
    ring.upload(ring.vectors())
    silo, slot = ring.silos["clinic-01"], {"round": 1, "attempt": 1}
    for bad in (["clinic-01"], ring.names[::-1], [*ring.names, "x"], None, ring.names * 2):
        with pytest.raises(SiteError):
            silo.unmask({**slot, "survivors": bad})
    first = silo.unmask({**slot, "survivors": ring.names[:5]})
    assert first == silo.unmask({**slot, "survivors": ring.names[:5]})
    assert {len(share) for share in first["shares"]} == {shamir.SHARE}
    for other in (ring.names, ring.names[1:]):
        with pytest.raises(SiteError, match="answered for other survivors"):
            ring.silo("clinic-01").unmask({**slot, "survivors": other})


def test_a_repeated_answer_is_noted_again(ring):
    """A power cut may have left the file with the answer, and undone the record's row."""
    vectors = ring.vectors()
    ring.upload(vectors)
    silo, slot = ring.silos["clinic-01"], {"round": 1, "attempt": 1, "survivors": ring.names}
    first = silo.unmask(slot)
    for left in (1, 0):  # rows before the answer is asked for again
        with Record(silo.folder).write() as db:
            db.execute("DELETE FROM disclosed WHERE ?", (not left,))
        assert silo.unmask(slot) == first
        with Record(silo.folder).reading() as db:
            found = db.execute("SELECT count(*) FROM disclosed WHERE kind = ?", (SUM,))
            assert found.fetchone() == (1,)
    ring.begin(1, 2)
    ring.upload(vectors, 1, 2)
    with pytest.raises(SiteError, match="summed over other silos before"):
        silo.unmask({"round": 1, "attempt": 2, "survivors": ring.names[:5]})


def test_one_question_is_answered_for_one_set_over_all_runs(ring):
    """Two sums of one question over sets that differ by a silo would differ by its update."""
    vectors = ring.vectors()
    masked, _ = ring.upload(vectors)
    ring.open(masked, ring.names)
    ring.begin(1, 2)
    masked, _ = ring.upload(vectors, 1, 2)
    with pytest.raises(SiteError, match="summed over other silos before"):
        ring.open(masked, ring.names[1:], 1, 2)
    found, _ = ring.open(masked, ring.names, 1, 2)  # a repeat over the same set
    ring.begin(1, 3)
    ring.settings["strategy"] = "fedavg"  # in which silos weigh 100 instead of 1
    ring.upload(vectors, 1, 3)
    with pytest.raises(SiteError, match="summed over other silos before"):
        ring.silos["clinic-01"].unmask({"round": 1, "attempt": 3, "survivors": ring.names})
    assert (found == plain_sum(vectors, ring.names)).all()


def test_masks_differ_between_rounds_and_attempts(ring):
    """The same model, settings and weights: the list's statements have round and attempt."""
    contexts = set()
    for slot in ((1, 1), (1, 2), (2, 1)):
        ring.begin(*slot)
        record = ring.record(*slot, ring.names, "clinic-01")
        contexts.add(ring.enter("clinic-01", record, RECEIVED).entry["context"])
    assert len(contexts) == 3


def test_a_repeat_has_the_weights_of_before(ring):
    """Where the server says so, and for the silos of before only; a silo without them refuses."""
    ring.settings["strategy"] = "fedavg"
    ring.upload(ring.vectors())  # each weighs 100
    ring.settings["strategy"] = "scaffold"  # in which each weighs 1
    ring.begin(1, 2, ring.names[:5])
    record = {**ring.record(1, 2, ring.names[:5], "clinic-01"), "again": True}
    assert {*ring.enter("clinic-01", record).entry["weights"].values()} == {100}
    assert {*ring.enter("clinic-01", {**record, "again": False}).entry["weights"].values()} == {
        1
    }
    for received in ("c" * 64, ring.received(2)):
        with pytest.raises(SiteError, match="no weights of an earlier attempt at round 1"):
            ring.enter("clinic-01", record, received)


def test_a_round_is_answered_for_one_set_whatever_it_starts_from(ring):
    """A model with one bit changed, such as -0 for 0, is another question and gives the same steps."""
    vectors, slot = ring.vectors(), {"round": 1, "attempt": 2}
    masked, _ = ring.upload(vectors)
    ring.open(masked, ring.names)
    ring.begin(1, 2)
    for name in ring.names[1:]:
        silo = ring.silos[name]
        ring.enter(name, ring.record(1, 2, ring.names, name), "c" * 64)
        silo.mask(vectors[name].copy())
        with pytest.raises(SiteError, match="summed over other silos before"):
            silo.unmask({**slot, "survivors": ring.names[1:]})
        assert silo.unmask({**slot, "survivors": ring.names})["shares"]


def test_false_shares_are_traced_to_their_silo(ring):
    vectors = ring.vectors()
    offers = ring.offers["clinic-02"]["sealed"]
    offers[0] = offers[0][:-1] + bytes([offers[0][-1] ^ 1])  # for clinic-01
    masked, _ = ring.upload(vectors)
    assert ring.silos["clinic-01"].faults == ["clinic-02"]
    answer = ring.silos["clinic-03"].unmask

    def lies(record):
        shares = answer(record)["shares"]
        return {"shares": [bytes(66), *shares[1:]]}

    ring.silos["clinic-03"].unmask = lies
    with pytest.raises(SiteError, match="4 shares of clinic-01's"):
        ring.open(masked, ring.names, asked=ring.names[:5])
    total, false = ring.open(masked, ring.names)
    assert (total == plain_sum(vectors, ring.names)).all()
    assert [*false] == ["clinic-03"]


@pytest.mark.parametrize("gone", [0, 1])
def test_a_silo_that_shares_another_secret_is_named(ring, gone, monkeypatch):
    """Of its self mask, or of its mask key where it has vanished."""
    monkeypatch.setattr(silo, "split", lambda _, *of: shamir.split(bytes(32), *of))
    ring.begin(1, 2)
    masked, _ = ring.upload(ring.vectors(), 1, 2)
    with pytest.raises(SiteError, match="another secret than it has signed: clinic-01 is at"):
        ring.open(masked, ring.names[gone:], 1, 2)


def test_a_statement_says_what_it_is_for(ring):
    one = read_statement(ring.offers["clinic-01"]["statement"])
    assert (one.slot, one.silo) == (f"{RUN}.1.1", "clinic-01")
    for bad in ("", "{}", "[]", json.dumps({"statement": "{}"}), "x" * 5000):
        with pytest.raises(SiteError, match="it is no"):
            read_statement(bad)


@pytest.mark.parametrize("phase", ["_note", "_write"])
def test_a_silo_killed_as_it_answers_gives_that_answer_and_no_other(ring, phase, monkeypatch):
    """Kill -9 as the question is noted, or as the answer is written: before it is sent."""
    ring.upload(ring.vectors())
    close_records()
    slot = {"round": 1, "attempt": 1, "survivors": ring.names[1:]}
    real = getattr(SecureSilo, phase)

    def dies(*args, **more):
        real(*args, **more)
        os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(SecureSilo, phase, dies)
        silo = ring.silos["clinic-01"]
        assert in_fork(lambda: silo.unmask(slot)) == -signal.SIGKILL
    silo = ring.silo("clinic-01")
    with pytest.raises(SiteError, match=r"other (survivors|silos)"):
        silo.unmask({**slot, "survivors": ring.names})
    answer = silo.unmask(slot)
    assert all(answer["shares"]) and answer == silo.unmask(slot)
