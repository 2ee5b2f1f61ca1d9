"""Masked rounds through the real loop, gates and app: the same bits as without masks, silos that vanish, repeats."""

from __future__ import annotations

import shutil

import pytest
from damage import flip
from representatives import seldom, some
from secure_ring import fields_of, state
from secured import SECURE, Secured, absent, close, go, kinds
from tiny import comparable, federate, random_silos, same

from client.protocol.chain import digest
from client.protocol.keys import load_key
from client.protocol.secure import KEYS, START, UNMASK
from client.protocol.secure.statements import read_statement
from client.site.record import close_records
from partitions.common.errors import RunFailedError
from server.run.checkpoints import Checkpoints
from server.run.secure import rounds
from server.run.secure.rounds import SecureRounds


@pytest.fixture(autouse=True)
def _records(monkeypatch):
    monkeypatch.setattr(rounds, "AWAY_SECONDS", 0.1)
    yield
    close_records()


@pytest.fixture
def six(tmp_path):
    """Six silos: five are needed for a sum, so one may be gone."""
    return random_silos(tmp_path, {"a": 6, "b": 11, "c": 8, "d": 7, "e": 9, "f": 5})


def failed(reason, *given, **changes):
    with pytest.raises(RunFailedError, match=reason):
        go(*given, **changes)


NO_KEY = "00" * 32  # of small order: it gives a secret that everybody knows
METHODS = ("fedavg", "scaffold", "fedper", "lg-fedavg", "fedapm", "fedlama", "player-fl")


@some("method", METHODS, {"scaffold", "fedlama"}.__contains__)
def test_masked_and_unmasked_bits_are_the_same(six, tmp_path, method):
    hidden = {"mlp__hidden": "4", "strategy": method}
    hidden |= {"player-fl.combine": "mean"} if method == "player-fl" else {}
    secured = Secured(tmp_path, six)
    masked, plain = go(six, tmp_path, secured, **hidden), go(six, tmp_path, None, **hidden)
    for name, vector in plain.strategy.state.arrays.items():
        assert same(masked.strategy.state.arrays[name], vector), name
    assert masked.values("secure_silos") == [6, 6, 6]
    assert masked.values("secure_attempts") == [1, 1, 1]
    assert kinds(secured, KEYS) == [1] and kinds(secured, START) == [1]
    assert kinds(secured, UNMASK) == [1, 2, 3]


def test_what_leaves_is_masked(six, tmp_path):
    """And no sum of five of the six shows the sixth: each is noise without the answers."""
    sent = {}
    for masked in (False, True):
        secured = Secured(tmp_path, six) if masked else None
        run = go(six, tmp_path, secured, rounds=1)
        sent[masked] = {
            run.grid.name_of(message.metadata.dst_node_id): reply.content.array_records["masked"]["sum"].numpy()
            for message, reply in run.grid.traffic
            if message.metadata.message_type == "train"
        }  # fmt: skip
    for silo in six:
        assert (sent[True][silo] != sent[False][silo]).all()


@pytest.mark.parametrize(
    "kind, on_the_way, missed",
    [
        ("train", "gone", {2}),
        seldom("train", "lost", {2}),
        seldom(UNMASK, "gone", set[int]()),
        (UNMASK, "lost", set[int]()),
        seldom(KEYS, "gone", {1}),
        seldom(KEYS, "lost", {1}),
        seldom(START, "gone", {1}),
        (START, "lost", {1}),
    ],
)
def test_a_silo_that_vanishes_in_any_phase(six, tmp_path, kind, on_the_way, missed):
    """The sum is that of the others, and the silo is back in the next round."""
    secured, once = Secured(tmp_path, six), 1 if kind in (KEYS, START) else 2
    setattr(secured, on_the_way, lambda *of: of == ("f", kind, once))
    masked = go(six, tmp_path, secured, rounds=4)
    plain = federate(
        six, state_dir=tmp_path / "plain", prepare=absent(missed), rounds=4, **SECURE
    )
    close(masked, plain)
    assert masked.values("secure_silos") == plain.values("secure_silos")
    assert masked.values("secure_silos") == [6 - (r in missed) for r in range(1, 5)]
    assert masked.values("secure_attempts") == [1, 1, 1, 1]


def test_a_silo_that_stays_away(six, tmp_path):
    """It is asked no more; the others go on with the keys that they have."""
    secured = Secured(tmp_path, six)

    def leave(silo, kind, number):
        if number == 2 and kind == "train":
            secured.offline = {"f"}
        return False

    secured.gone = leave
    masked = go(six, tmp_path, secured, rounds=4)
    plain = go(six, tmp_path, absent({2, 3, 4}), rounds=4)
    close(masked, plain)
    assert masked.values("secure_silos") == [6, 5, 5, 5]
    assert kinds(secured, KEYS) == [1]


@pytest.mark.parametrize(
    "kind, times, attempts", [("train", 1, 2), (UNMASK, 3, 2), seldom(UNMASK, 2, 1)]
)
def test_a_round_is_repeated_over_all(six, tmp_path, kind, times, attempts):
    """Two of six are too many to be gone: with new keys the round is done once more, and once only.

    Before that, the question of its masks goes three times.
    """
    secured, left = Secured(tmp_path, six), {"d": times, "e": times}

    def lose(silo, asked, number):
        if (asked, number) == (kind, 2) and left.get(silo):
            left[silo] -= 1
            return True
        return False

    secured.lost = lose
    masked, plain = go(six, tmp_path, secured), go(six, tmp_path, None)
    assert same(masked.strategy.state.model, plain.strategy.state.model)
    assert masked.values("secure_attempts") == [1, attempts, 1]
    assert masked.values("secure_silos") == [6, 6, 6]
    assert kinds(secured, KEYS) == [1, 2][:attempts]


def test_a_silo_of_the_asked_set_that_never_returns(six, tmp_path, monkeypatch):
    """The sum is that of all six once any five have answered; the run goes on with those. Before, it ended."""
    secured = Secured(tmp_path, six)

    def cut(silo, kind, number):
        if (silo, kind, number) == ("d", UNMASK, 2):
            secured.offline = {"e", "f"}
        return False

    secured.gone = cut
    monkeypatch.setattr(rounds.time, "sleep", lambda _: secured.offline.discard("e"))
    masked, plain = go(six, tmp_path, secured), go(six, tmp_path, absent({3}))
    close(masked, plain)
    assert masked.values("secure_silos") == [6, 6, 5]
    assert masked.values("secure_attempts") == [1, 1, 1]


def test_a_round_that_was_asked_for_is_repeated_over_the_same_silos_only(six, tmp_path):
    """In the run and after a resume. Another set would be the five that are left."""
    secured = Secured(tmp_path, six)

    def cut(silo, kind, number):
        if (kind, number) == (UNMASK, 2):
            secured.offline = {"f"}
            return silo in "de"
        return False

    secured.lost = cut
    short = {"min_silos": 5, "round_timeout": 0.3}  # what a resume waits for silos
    line = r"^round 2, attempt [^\n]* with the same silos, or begin one [^\n]*; it was begun over a, b, c, d, e, f$"
    failed(line, six, tmp_path, secured, directory=tmp_path / "run", **short)
    secured.run, secured.lost = 2, lambda *of: False
    again = {"directory": tmp_path / "run", "resume": True, **short}
    failed(line, six, tmp_path, secured, **again)
    secured.offline, secured.run = set(), 3
    masked, plain = go(six, tmp_path, secured, **again), go(six, tmp_path, None)
    assert same(masked.strategy.state.model, plain.strategy.state.model)


def test_a_repeat_has_the_weights_of_the_list_in_which_the_round_began(tmp_path):
    """f vanishes, so the median of those left is another one, and by it the largest silo would weigh less.

    Then masks are asked for in vain, in the run and in its resume: hospitals would refuse other weights for good.
    """
    sizes = {"a": 90, "b": 5, "c": 5, "d": 6, "e": 6, "f": 7}
    six = random_silos(tmp_path, sizes)
    secured, folder = Secured(tmp_path, six), {"directory": tmp_path / "run", "rounds": 2}

    def lose(silo, kind, number):
        if (silo, kind, number) == ("f", "train", 2):
            secured.offline = {"f"}
            return True
        return silo in "de" and (kind, number) == (UNMASK, 2)

    secured.lost = lose
    line = r"^round 2, attempt 3: 3 of 5 silos have answered how to open its sum, and 4 are needed \(d does not answer"
    failed(line, six, tmp_path, secured, **folder)
    secured.run, secured.lost, secured.offline = 2, lambda *of: False, set()
    masked = go(six, tmp_path, secured, **folder, resume=True)
    close(masked, go(six, tmp_path, absent({2}), rounds=2))
    assert masked.values("secure_silos") == [6, 5]


def test_a_resume_from_an_older_checkpoint(six, tmp_path):
    """The newest is damaged: the rounds since the one before have the silos of then. Without knowing them: one line."""
    secured, folder = Secured(tmp_path, six), {"directory": tmp_path / "run", "rounds": 3}
    secured.lost = lambda *of: of == ("f", "train", 3)
    go(six, tmp_path, secured, **folder)
    saved = {
        file: file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()
    }
    (newest,) = [file for file in saved if file.name == "server.safetensors"]
    secured.lost = lambda *of: False
    for run, kept in ((2, False), (3, True)):
        for file, content in saved.items():
            file.write_bytes(content)
        flip(newest)
        secured.run = run
        if kept:
            assert go(six, tmp_path, secured, **folder, resume=True).values("secure_silos") == [
                6,
                6,
                5,
            ]
            continue
        newest.with_name("secure.safetensors").unlink()
        line = r"^round 3, attempt 1: 1 of 6 silos [^\n]* \(a does not answer [^\n]* a refuses: [^\n]* was summed over "
        failed(line, six, tmp_path, secured, **folder, resume=True)


class KilledError(BaseException):
    """What ends the server."""


def kill_at(patch, owner, step, call, done):
    """End the server in this call of a step, which is done before or not."""
    begun, calls = getattr(owner, step), list[int]()

    def kill(self, *of):
        calls.append(1)
        if done or len(calls) < call:
            begun(self, *of)
        if len(calls) == call:
            raise KilledError

    patch.setattr(owner, step, kill)


@pytest.mark.parametrize("gone", [False, True])
def test_a_server_killed_before_it_has_opened_a_sum(tmp_path, gone, monkeypatch):
    """Before it asks for the masks of round 2, without f.

    No hospital has answered for that sum, so nothing was opened: a resumed run, where e is gone, opens that of seven.
    With all eight it is that of before.
    """
    nine = random_silos(tmp_path, dict.fromkeys("abcdefghi", 6))
    secured, folder = Secured(tmp_path, nine), {"directory": tmp_path / "run", "rounds": 2}
    secured.lost = lambda *of: of == ("f", "train", 2)
    with monkeypatch.context() as patch, pytest.raises(KilledError):
        kill_at(patch, SecureRounds, "_write", 3, done=True)
        go(nine, tmp_path, secured, **folder)
    assert ("a", UNMASK, 2) not in secured.asked
    again = {**folder, "resume": True}
    if gone:
        secured.lost = lambda *of: of == ("e", "train", 2)
    secured.run, missing = 2, {("f", 2), *(("e", 2) for _ in range(gone))}

    def prepare(grid):
        grid.absent = missing

    masked = go(nine, tmp_path, secured, **again)
    close(masked, go(nine, tmp_path, prepare, rounds=2))
    assert masked.values("secure_silos") == [9, 8 - gone]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "owner, step, call, done",
    [(SecureRounds, "_write", 4, True), (Checkpoints, "save", 2, False)],
)
def test_a_server_killed_once_it_has_opened_a_sum(
    tmp_path, owner, step, call, done, monkeypatch
):
    """A resumed run ends round 2, in which f was lost, without any silo. a, which was in it, is away since."""
    nine = random_silos(tmp_path, dict.fromkeys("abcdefghi", 6))
    runs = []
    for killed in (False, True):
        place = tmp_path / str(killed)
        place.mkdir()
        secured = Secured(place, nine)
        secured.lost = lambda *of: of == ("f", "train", 2)
        folder = {"directory": place / "run", "min_silos": 5, "round_timeout": 0.3}
        if killed:
            with monkeypatch.context() as patch, pytest.raises(KilledError):
                kill_at(patch, owner, step, call, done)
                go(nine, place, secured, **folder)
        else:
            go(nine, place, secured, **folder, rounds=2)
        before = len(secured.asked)
        secured.run, secured.offline = 2, {"a"}
        runs.append(go(nine, place, secured, **folder, resume=True))
        assert {number for _, kind, number in secured.asked[before:] if kind == "train"} == {3}
    undisturbed, resumed = runs
    assert comparable(resumed.rows) == comparable(undisturbed.rows)
    assert same(resumed.strategy.state.model, undisturbed.strategy.state.model)
    assert resumed.values("secure_silos") == [9, 8, 8]


def test_three_attempts_end_the_run(six, tmp_path):
    secured = Secured(tmp_path, six)
    secured.lost = lambda silo, kind, number: silo in "de" and (kind, number) == ("train", 2)
    line = r"^round 2, attempt 3: 4 masked vectors have come, and 5 are needed"
    failed(line, six, tmp_path, secured)


def test_too_few_silos_with_keys(six, tmp_path):
    secured = Secured(tmp_path, six)
    secured.lost = lambda silo, kind, number: silo in "de" and kind == START
    line = r"^round 1, attempt 3: 4 silos have keys for a sum, and 5 are needed$"
    failed(line, six, tmp_path, secured)


def spoil(kind, key, value, silos="f"):
    """These hospitals send something else in round 1 in their answers' records."""

    def change(silo, asked, number, reply):
        if silo in silos and (asked, number) == (kind, 1):
            record = reply.content.config_records["secure"]
            record[key] = value(record[key]) if callable(value) else value

    return change


@pytest.mark.parametrize(
    "kind, key, value, fault, missed",
    [
        (KEYS, "statement", "nonsense", "its keys are invalid: it is no statement", {1}),
        (START, "sealed", lambda found: found[:-1], "its shares are not those", {1}),
        ("train", "sealed", 5, "f does not answer train: its record: sealed = 5", set[int]()),
        seldom(START, "sealed", lambda found: [one + bytes(1) for one in found], "its record: sealed", {1}),
        (UNMASK, "shares", lambda shares: [bytes(66)] * len(shares), "f is at fault: its share of ", set[int]()),
        seldom(UNMASK, "shares", "none", "", set[int]()),
        seldom(KEYS, "statement", 7, "f does not answer query.secure_keys: its record: statement = 7", {1}),
        seldom(START, "statement", str.upper, "its keys are invalid: it is no statement", {1}),
        seldom(START, "sealed", [b""], "f does not answer query.secure_start: its record: sealed.1", {1}),
        seldom(UNMASK, "shares", [1, 2], "", set[int]()),
    ],
)  # fmt: skip
def test_a_silo_that_sends_nonsense_does_not_stop_the_others(
    six, tmp_path, kind, key, value, fault, missed, caplog
):
    """It is left out of the round's list, or named, and asked for new keys before the next round."""
    secured = Secured(tmp_path, six)
    secured.change = spoil(kind, key, value)
    with caplog.at_level("WARNING", logger="flwr"):
        masked = go(six, tmp_path, secured)
    plain = go(six, tmp_path, absent(missed))
    assert fault in caplog.text
    close(masked, plain)
    assert masked.values("secure_silos") == [6 - (r in missed) for r in (1, 2, 3)]


@pytest.mark.parametrize(
    "kind, field, value, missed",
    [
        (KEYS, "seal", NO_KEY, {1}),
        (KEYS, "group", "a", {1, 2}),
        seldom(KEYS, "slot", "1.1.2", {1}),
        seldom(START, "mask", NO_KEY, {1}),
        (START, "secret", "", {1}),
    ],
)
def test_a_silo_that_signs_nonsense_is_left_out_alone(
    six, tmp_path, kind, field, value, missed
):
    """A key of small order gives a secret that everybody knows: each hospital would refuse the whole list.

    In the group of another silo it would take that silo out with it.
    """
    secured = Secured(tmp_path, six)
    secured.change = spoil(kind, "statement", signing(tmp_path, **{field: value}))
    masked = go(six, tmp_path, secured, rounds=2)
    close(masked, go(six, tmp_path, absent(missed), rounds=2))
    assert masked.values("secure_silos") == [6 - (r in missed) for r in (1, 2)]


def test_a_sum_is_over_so_many_silos_at_most(six, tmp_path, monkeypatch):
    """Hospitals refuse a longer list."""
    monkeypatch.setattr(rounds, "MOST_SILOS", 5)
    assert go(six, tmp_path, Secured(tmp_path, six), rounds=1).values("secure_silos") == [5]


def test_statements_of_another_attempt_than_asked_for_are_refused(six, tmp_path):
    """Also where all silos agree on it: their masks would be those of a slot that is over."""
    secured = Secured(tmp_path, six)
    sign = signing(tmp_path, slot="1.1.9")
    secured.change = spoil(KEYS, "statement", sign, "abcdef")
    failed(
        r"^round 1, attempt 3: 0 silos have keys for a sum, and 5 are needed",
        six,
        tmp_path,
        secured,
    )


def signing(folder, **fields):
    """A silo signs its statement with other fields."""

    def sign(text):
        one = read_statement(text)
        return state(load_key(folder / f"{one.silo}.key"), **fields_of(one) | fields)

    return sign


def test_two_silos_with_one_key_are_left_out_alone(tmp_path):
    """Hospitals refuse a list in which a key is there twice: both could end the run."""
    nine = random_silos(tmp_path, dict.fromkeys("abcdefghi", 6))
    secured = Secured(tmp_path, nine)
    sign = signing(tmp_path, seal="09" + "00" * 31)
    secured.change = spoil(KEYS, "statement", sign, "hi")
    masked = go(nine, tmp_path, secured, rounds=2)
    assert masked.values("secure_silos") == [7, 9]


@pytest.mark.parametrize("kind, missed", [(START, {1, 2, 3}), ("train", {2, 3})])
def test_a_silo_whose_shares_are_none_is_left_out(six, tmp_path, kind, missed, caplog):
    """It has signed shares that cannot be opened: no sum with its masks could be. The others go on."""
    secured = Secured(tmp_path, six)

    def change(silo, asked, number, reply):
        if (silo, asked, number) == ("f", kind, 1):
            record = reply.content.config_records["secure"]
            sealed = [one[:64] + bytes(len(one) - 64) for one in record["sealed"]]
            signed = signing(tmp_path, shares=digest(b"".join(sealed)))(record["statement"])
            record["sealed"], record["statement"] = sealed, signed

    secured.change = change
    with caplog.at_level("WARNING", logger="flwr"):
        masked = go(six, tmp_path, secured)
    assert "too few silos could read the shares of f" in caplog.text
    close(masked, go(six, tmp_path, absent(missed)))
    assert masked.values("secure_silos") == [6 - (r in missed) for r in (1, 2, 3)]
    assert masked.values("secure_attempts") == [1 + (r == min(missed)) for r in (1, 2, 3)]


def test_a_silo_with_a_damaged_state_stays_in_the_sums(six, tmp_path):
    """Its messages say so, and the masks cancel all the same; the run does not go back to repeat a round."""
    secured = Secured(tmp_path, six)

    def damage(silo, kind, number):
        if (silo, kind, number) == ("a", "train", 3):
            for file in (tmp_path / "masked").rglob("a/**/*.safetensors"):
                flip(file)
        return False

    secured.gone = damage
    run = go(six, tmp_path, secured, rounds=5, directory=tmp_path / "run", strategy="fedavg-ft")
    assert run.values("secure_silos") == [6, 6, 5, 6, 6]
    assert run.values("secure_attempts") == [1] * 5
    assert [row.round for row in run.rows if row.metric == "state_lost"] == [3]


def test_methods_that_share_a_model_sum_it_over_the_same_silos(six, tmp_path):
    """Ditto's shared model is FedAvg's. f was away in FedAvg's second round, and in Ditto's it is left out.

    Else the two sums would differ by f's step, and each hospital would refuse the second one for good.
    """
    secured = Secured(tmp_path, six)
    secured.gone = lambda *of: of == ("f", "train", 2)
    go(six, tmp_path, secured, directory=tmp_path / "run")

    def prepare(grid):
        """As where both methods have one directory."""
        checkpoint = tmp_path / "next" / "checkpoint"
        shutil.copytree(tmp_path / "run" / "checkpoint", checkpoint, dirs_exist_ok=True)
        secured(grid)

    secured.gone, secured.run = lambda *of: False, 2
    masked = go(six, tmp_path, prepare, directory=tmp_path / "next", strategy="ditto")
    assert masked.values("secure_silos") == [6, 5, 6]
    assert masked.values("secure_attempts") == [1, 2, 1]
    plain = federate(
        six,
        state_dir=tmp_path / "compared",
        prepare=absent({2}),
        rounds=3,
        **{**SECURE, "strategy": "ditto"},
    )
    close(masked, plain)
