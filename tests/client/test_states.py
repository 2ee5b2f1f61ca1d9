"""Explicit state: what is never written to, what a silo keeps, BatchNorm statistics, dropout."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
from damage import flip
from failing import fails
from flwr.app import Context, Error, Message, RecordDict
from memory import bytes_alone
from representatives import product
from tiny import (
    METHODS,
    Witness,
    comparable,
    federate,
    round_of,
    rows_of,
    same,
    train_replies,
    write_silo,
)

from client.store import StateStore, states_in
from models.flat import apart
from models.networks.registry import MODELS
from partitions.common.errors import RunFailedError
from server.run.reporter import Progress
from server.simulation.engine import flower_identity
from strategies.base.client import SiloClient
from strategies.base.robust import weighted_mean
from strategies.base.state import State
from strategies.base.transport.payload import array_record, decode, tensor_of
from strategies.base.transport.reporting import MOST_STATES, DamagedStateError, damages

TRAINS = [m for m in METHODS if m != "local"]  # those whose silos send a model

# ---- What must not be written to -----------------------------------------------------------------------------------


@product(method=METHODS, model=["mlp", "tiny-bn"])
def test_received_vectors_and_states_are_never_written_to(three, method, model, tiny_bn):
    """In one process tensors travel uncopied: a write would reach other silos, the server, or a saved state."""
    witness = Witness()
    run = federate(
        three,
        strategy=method,
        model=model,
        rounds=4,
        local_epochs=2,
        batch_size=4,
        learning_rate=0.1,
        momentum=0.9,
        participation=0.7,
        optimizer_state="keep",
        apple__max_downloads=1,
        fedala__max_epochs=2,
        fedala__layers=2,
        prepare=witness,
    )
    witness.remember(array_record(run.strategy.state.arrays))
    witness.confirm(more_than=15)


SHOWN = ("reported", "candidate")  # what a silo keeps of the models that the report shows


@pytest.mark.parametrize("method", METHODS)
def test_evaluation_leaves_the_state_alone(three, method, tmp_path):
    """Neither memory nor file of a silo changes by an evaluate message, in the rounds and at the close: but for the
    model that the report shows, and the file that a silo of a received model has for it before it trains. A third file
    may go.
    """
    checked = []
    kept: dict[str, tuple[Any, ...]] = {}

    def snapshot(context):
        loaded = {p.name: State.load(p) for p in sorted((tmp_path / "run").rglob("round-*"))}
        files = {
            name: without(state) for name, state in loaded.items() if state.numbers["round"]
        }
        held = context.state.get("arrays", {})
        numbers = context.state.get("numbers", {"json": "{}"})
        state = State(
            {k: tensor_of(a).clone() for k, a in held.items()}, json.loads(numbers["json"])
        )
        return files, *without(state)

    def without(state):
        trained = state.numbers.get("round")
        arrays = {
            k: v.numpy().tobytes()
            for k, v in state.arrays.items()
            if k.partition(".")[0] not in SHOWN
        }
        return arrays, {
            k: v for k, v in state.numbers.items() if k not in SHOWN
        } if trained else {}

    def before(silo, message, context):
        kept[silo] = snapshot(context)

    def prepare(grid):
        def after(silo, message, reply):
            if message.metadata.message_type == "evaluate":
                (files, *now), (known, *then) = snapshot(grid.context_of(silo)), kept[silo]
                assert now == then and files == {name: known[name] for name in files}
                assert len(files) >= min(len(known), 2)
                checked.append(silo)
            return reply

        grid.before, grid.after = before, after

    federate(
        three,
        directory=tmp_path / "run",
        strategy=method,
        rounds=3,
        participation=0.7,
        prepare=prepare,
        fedala__max_epochs=2,
        apple__max_downloads=1,
    )
    assert len(checked) == 3 * 1 + 3


@pytest.mark.parametrize("method", METHODS)
def test_a_round_that_fails_half_way_saves_nothing(two, method, tmp_path, monkeypatch):
    """b fails in round 2 after its training; its state is that of round 1, and round 3 goes on from there."""
    check = SiloClient.check_finite

    def failing(self, *vectors):
        if (self.silo.name, self.round) == ("b", 2):
            self.state.arrays["personal"] = torch.zeros(12)
            raise RuntimeError("the device is gone")
        check(self, *vectors)

    monkeypatch.setattr(SiloClient, "check_finite", failing)
    states = {}

    def prepare(grid):
        def before(silo, message, context):
            if silo == "b" and "arrays" in context.state:
                states[round_of(message)] = grid.state("b").arrays

        grid.before = before

    seen: list[Progress] = []
    federate(
        two,
        directory=tmp_path / "run",
        strategy=method,
        rounds=3,
        prepare=prepare,
        watch=seen.append,
        fedala__max_epochs=2,
    )
    reason = seen[1].rejected.pop("b")
    assert re.fullmatch(
        r"RuntimeError in strategies/base/client.py:\d+: a fault of the program; [^\n]*", reason
    )
    assert not seen[1].rejected and "memory" not in reason
    assert states[2].keys() == states[3].keys()
    assert all(same(states[2][k], states[3][k]) for k in states[2])
    files = sorted(p.name for p in (tmp_path / "run").rglob("b/round-*"))
    assert files == ["round-000001.safetensors", "round-000003.safetensors"]


# ---- What a silo keeps ---------------------------------------------------------------------------------------------


def test_the_best_personal_model_is_kept_beside_the_last(tmp_path):
    """Validation accuracy of the personal model by round: 1, 1, 0 (before round 3 the file's labels are flipped)."""
    files = {"a": write_silo(tmp_path / "a.npz", [[3], [-3]] * 3, [0, 1] * 3)}
    original = dict(np.load(files["a"]).items())

    def before(silo, message, context):
        if round_of(message) == 3:
            np.savez(files["a"], **{**original, "y_val": 1 - original["y_val"]})

    run = federate(files, strategy="local", rounds=3, before=before)
    assert run.values("accuracy", "a", "personal", "val") == [1, 1, 0]
    arrays = run.grid.state("a").arrays
    assert same(arrays["personal"], run.personal("a"))
    assert not same(arrays["best"], arrays["personal"])
    one_round = federate(
        files, strategy="local", rounds=1, prepare=lambda grid: np.savez(files["a"], **original)
    )
    assert same(arrays["best"], one_round.personal("a"))  # the first of equals


def test_state_files_are_read_back_as_they_were(tmp_path):
    whole = torch.arange(12.0)
    state = State(
        {"a": whole, "same": whole, "view": whole[3:6], "scalar": torch.tensor(2.5)},
        {"n": [1, 0.1 + 0.2, None]},
    )
    state.save(tmp_path / "deep/state.safetensors")
    read = State.load(tmp_path / "deep/state.safetensors")
    assert read.numbers == state.numbers
    assert read.arrays.keys() == state.arrays.keys()
    assert all(same(read.arrays[k], v) for k, v in state.arrays.items())
    with safetensors.safe_open(tmp_path / "deep/state.safetensors", "pt") as file:
        assert {*file.keys()} == {*state.arrays} - {"same"}
    # No temporary file is left
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["state.safetensors"]
    (tmp_path / "bad.safetensors").write_bytes(b"\x00" * 20)
    fails(
        ValueError, r"bad\.safetensors cannot be read", State.load, tmp_path / "bad.safetensors"
    )


@pytest.mark.parametrize("method", ["local", "fedala", "apple"])
def test_states_in_files_only_and_saved_now_and_then(three, method, tmp_path):
    """A deployed silo has a state-dir. Rounds that need no checkpoint must not be forgotten there."""
    memory = federate(three, strategy=method, rounds=5)
    for every in (1, 2):
        files = federate(
            three,
            strategy=method,
            rounds=5,
            checkpoint_every=every,
            directory=tmp_path / f"run-{every}",
            state_dir=tmp_path / f"state-{every}",
        )
        assert comparable(files.rows) == comparable(memory.rows)


# ---- BatchNorm statistics ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_a_state_that_is_written_at_once_is_not_copied(three, method, tmp_path, monkeypatch):
    """The network itself is written, and the file has what memory would hold."""
    settings = {"strategy": method, "rounds": 2}
    expected = federate(three, **settings)

    def copied(vector, others, live):
        assert vector is not live
        return apart(vector, others, live)

    monkeypatch.setattr("strategies.base.client.apart", copied)
    federate(three, state_dir=tmp_path, **settings)
    for silo in three:
        (file,) = tmp_path.rglob(f"{silo}/*/*-000002.safetensors")
        found, kept = State.load(file).arrays, expected.grid.state(silo).arrays
        assert found.keys() == kept.keys()
        assert all(same(found[name], kept[name]) for name in kept)


@pytest.mark.parametrize("method", TRAINS)
def test_shared_statistics_are_averaged(three, method, tiny_bn):
    """The server's statistics are the sample-weighted mean of the replies', and what every silo starts from."""
    run = federate(
        three,
        strategy=method,
        model="tiny-bn",
        rounds=2,
        learning_rate=0.1,
        fedala__max_epochs=2,
    )
    sent = {
        key: decode(r.content)[0].models["buffers"].vector for key, r in train_replies(run.grid)
    }
    assert all(v.shape == (8,) for v in sent.values())
    expected = weighted_mean([sent[s, 1] for s in "abc"], [6, 10, 8])
    for silo in three:
        assert same(run.sent_to(silo, 2)["buffers"].vector, expected)
    assert same(
        run.strategy.state.arrays["buffers"],
        weighted_mean([sent[s, 2] for s in "abc"], [6, 10, 8]),
    )


@pytest.mark.parametrize("method", ["fedavg", "fedprox-ft"])
def test_the_received_model_has_the_received_statistics(three, method, tiny_bn):
    """Its loss on silo a, from what the server sent, by a plain module in evaluation mode."""
    run = federate(three, strategy=method, model="tiny-bn", rounds=2, learning_rate=0.1)
    sent = run.sent_to("a", 2)
    named = run.strategy.layout.unflatten(sent["global"].vector, sent["buffers"].vector)
    module = MODELS["tiny-bn"].make((3,), 3, None).eval()
    module.load_state_dict(named, strict=False)
    x, y = rows_of(three["a"])
    loss = torch.nn.functional.cross_entropy(
        module(torch.tensor(x, dtype=torch.float32)), torch.tensor(y)
    )
    assert run.values("loss", "a", "received")[1] == pytest.approx(loss.item(), abs=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_local_statistics_stay_in_the_silo(three, method, tiny_bn):
    run = federate(
        three,
        strategy=method,
        model="tiny-bn",
        buffers="local",
        rounds=2,
        learning_rate=0.1,
        fedala__max_epochs=2,
    )
    for message, reply in run.grid.traffic:
        assert "model.buffers" not in message.content
        assert "model.buffers" not in reply.content
    own = [run.grid.state(silo).arrays["personal.buffers"] for silo in three]
    assert not same(own[0], own[1])


def test_local_is_one_hot_apple_with_local_statistics(three, tiny_bn):
    """Bit for bit also with BatchNorm, where every silo keeps its own statistics."""
    options = {
        "model": "tiny-bn",
        "buffers": "local",
        "rounds": 3,
        "batch_size": 4,
        "learning_rate": 0.1,
    }
    alone = federate(three, strategy="local", **options)
    apple = federate(
        three,
        strategy="apple",
        apple__initial_dr="own",
        apple__dr_learning_rate=0.0,
        apple__common_init=True,
        **options,
    )
    left_out = ("round_seconds", "bytes_down", "bytes_up")
    assert comparable(alone.rows, without=left_out) == comparable(apple.rows, without=left_out)


def test_dropout_follows_the_seed(three):
    """Equal runs though the process's own generator is somewhere else at every message; without dropout they differ."""
    options = {"mlp__hidden": "8", "rounds": 3, "batch_size": 4, "learning_rate": 0.1}

    def elsewhere(seed):
        return lambda grid: setattr(grid, "before", lambda *_: torch.manual_seed(seed))

    for method in METHODS:
        runs = [
            federate(
                three,
                strategy=method,
                mlp__dropout=0.5,
                fedala__max_epochs=3,
                prepare=elsewhere(seed),
                **options,
            )
            for seed in (1, 2)
        ]
        assert comparable(runs[0].rows) == comparable(runs[1].rows)
        dry = federate(
            three, strategy=method, mlp__dropout=0.0, fedala__max_epochs=3, **options
        )
        assert comparable(dry.rows) != comparable(runs[0].rows)


def test_a_silo_without_room_for_a_run_says_what_it_takes(three, tmp_path, monkeypatch):
    monkeypatch.setattr("partitions.common.sizes.available", lambda: 100)
    line = r"GB of memory \(4 copies\) and .* is free: free more, or take a smaller network"
    folders = {"directory": tmp_path / "run", "state_dir": tmp_path / "states"}
    fails(RunFailedError, line, federate, three, rounds=1, **folders)
    assert not [*(tmp_path / "states").rglob("*.safetensors")]


# ---- State files that do not fit -----------------------------------------------------------------------------------


def store_of(folder, run="run", run_id="0123456789abcdef"):
    config: Any = {"name": "a", "state-dir": str(folder)}
    context = Context(
        run_id=1, node_id=1, node_config=config, state=RecordDict(), run_config={}
    )
    return StateStore(context, run, "fedavg-7", run_id)


def kept(store, *rounds):
    for number in rounds:
        store.save(State({"personal": torch.full((2,), float(number))}), number, to_disk=True)
    assert store.folder is not None
    return states_in(store.folder)


def test_a_server_that_went_further_back_costs_no_state(tmp_path):
    """Its checkpoint is older than the silo's states: starting afresh would be silent, and delete them."""
    files = kept(store_of(tmp_path), 4, 5, 6, 7)
    assert len(files) == 3
    with pytest.raises(
        ValueError,
        match="resumes at round 4, this silo has kept its state of round 5 and later only",
    ):
        store_of(tmp_path).load(4)
    assert kept(store_of(tmp_path)) == files
    assert store_of(tmp_path).load(6).arrays["personal"].tolist() == [5, 5]


def test_at_most_three_states_take_room_at_one_time(two, tmp_path, monkeypatch):
    """Of FedAvg each has up to four models. The closing exchange writes the last one again."""
    most, save = list[int](), State.save

    def counted(state, path, **keep):
        if path.parent.parent.name == "a":
            most.append(1 + len(states_in(path.parent)))
        save(state, path, **keep)

    monkeypatch.setattr(State, "save", counted)
    federate(
        two, directory=tmp_path / "run", rounds=5, strategy="fedavg", state_dir=tmp_path / "s"
    )
    assert most == [1, 2, 3, 3, 3, 3]


def test_before_a_state_is_written_only_those_of_two_checkpoints_take_room(
    tmp_path, monkeypatch
):
    """A silo that is killed as it writes has them, and all that it had if one of them is damaged."""

    class KilledError(Exception):
        pass

    def killed(state, path):
        raise KilledError

    files = kept(store_of(tmp_path), 4, 5, 6)
    monkeypatch.setattr(State, "save", killed)
    store = store_of(tmp_path)
    flip(files[0])
    store.load(7, lost=6)
    fails(KilledError, None, kept, store, 7)
    assert states_in(files[0].parent) == files
    flip(files[0])
    fails(KilledError, None, kept, store_of(tmp_path), 7)
    assert states_in(files[0].parent) == files[:2]
    assert store_of(tmp_path).load(6).arrays["personal"].tolist() == [5, 5]


def test_a_repeated_first_round_starts_afresh(tmp_path):
    """There is nothing before it to go on from."""
    kept(store_of(tmp_path), 1)
    assert not store_of(tmp_path).load(1).arrays


def test_what_a_process_wrote_last_it_does_not_read(tmp_path, monkeypatch):
    """As long as the file is that one, and nobody has written into what it gave."""
    newest, _ = kept(store_of(tmp_path), 5, 6)
    read = []
    load = State.load

    def noted(path):
        read.append(path)
        return load(path)

    monkeypatch.setattr(State, "load", noted)
    for _ in range(2):
        state = store_of(tmp_path).load(7)
        assert state.arrays["personal"].tolist() == [6, 6] and not read
        state.numbers["round"] = 0
        state.arrays["best"] = torch.ones(2)
    state.arrays["personal"].zero_()  # as a round might that fails half way
    assert store_of(tmp_path).load(7).arrays["personal"].tolist() == [6, 6] and read == [newest]
    read.clear()
    State({"personal": torch.ones(2)}, {"run_id": "0123456789abcdef", "round": 6}).save(newest)
    assert store_of(tmp_path).load(7).arrays["personal"].tolist() == [1, 1] and read == [newest]


def test_the_own_model_is_mapped_from_its_file_as_memory_is_aligned(tmp_path):
    """So it takes no memory of its own between rounds, and sums over it give the same bits."""
    vector = torch.randn(1_000_003)
    store = store_of(tmp_path)
    arrays = {"best": vector[:7].clone(), "personal": vector.clone()}
    store.save(State(arrays), 6, to_disk=True)
    del arrays
    mapped = store_of(tmp_path).load(7).arrays["personal"]
    assert torch.equal(mapped, vector) and mapped.data_ptr() % 64 == 0
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    spans = [tuple(int(end, 16) for end in m[0].split("-")) for m in maps if "run-" in m[-1]]
    assert any(start <= mapped.data_ptr() < stop for start, stop in spans)


WATCHED = """
import sys
from pathlib import Path
import tiny
from memory import peak_memory

def call(message, context):
    with peak_memory() as peak:
        reply = app(message, context)
    most.extend(peak)
    return reply

app, most = tiny.client_app, []
tiny.client_app = call
tiny.federate(
    {"a": Path(sys.argv[1])}, state_dir=Path(sys.argv[2]), strategy="fedavg", rounds=4,
    mlp__hidden="2500,2500", learning_rate=0.01,
)
print(max(most[2:]))  # from the second round on
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux counts")
def test_a_round_takes_few_copies_of_the_model(tmp_path):
    """Beside network and models of before: a gradient that does not stay, the trained one, the reply, half a step."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(20, 200))
    file = write_silo(tmp_path / "a.npz", x, [*range(3)] * 6 + [0, 1], classes=3)
    model = 4 * (200 * 2500 + 2500 * 2500)
    assert bytes_alone(WATCHED, file, tmp_path / "state")[0] < 3.5 * model


def test_a_damaged_state_is_told_and_not_passed_over(tmp_path, caplog):
    """The reply names the file without its folder, and what there is before it; the site's log has the path."""
    left = (
        tmp_path
        / "run"
        / "fedavg-7"
        / "a"
        / "run-0123456789abcdef"
        / ".round-000004.safetensors.17.tmp"
    )
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half")  # by a process that was killed
    newest, older, oldest = kept(store_of(tmp_path), 4, 5, 6)
    assert not left.exists()
    flip(newest)
    with pytest.raises(DamagedStateError) as told:
        store_of(tmp_path).load(7)
    reason = "its state of round 6 is damaged, and it can go back to rounds 5, 4: round-000006.safetensors cannot"
    assert str(told.value).startswith(reason) and str(tmp_path) not in str(told.value)
    assert f"{newest} cannot be read" in caplog.text
    # As the server goes back
    assert store_of(tmp_path).load(6).arrays["personal"].tolist() == [5, 5]
    # As it goes on without
    assert store_of(tmp_path).load(7, lost=6).arrays["personal"].tolist() == [5, 5]
    flip(older)
    with pytest.raises(
        DamagedStateError, match="state of round 5 is damaged, and it can go back to round 4: "
    ):
        store_of(tmp_path).load(7)
    flip(oldest)
    with pytest.raises(
        DamagedStateError, match="state of round 6 is damaged, and it can go back to no round: "
    ):
        store_of(tmp_path).load(7)
    assert not store_of(tmp_path).load(7, lost=6).arrays


def test_a_damaged_first_state_had_none_before_it(tmp_path):
    (only,) = kept(store_of(tmp_path), 3)
    flip(only)
    with pytest.raises(
        DamagedStateError, match="state of round 3 is damaged, and it can go back to round 0: "
    ):
        store_of(tmp_path).load(5)


def test_what_a_reply_tells_of_damage_is_read():
    """Lies are not taken: states of rounds to come, other nodes, numbers without end."""

    def said(reason, node=1):
        with flower_identity():
            query = Message(RecordDict(), dst_node_id=1, message_type="train")
            reply = Message(Error(1, reason), reply_to=query)
        reply.metadata.__dict__["_src_node_id"] = node
        return damages([reply], {1: "a"}, server_round=9)

    (whole,) = said(str(DamagedStateError(8, [7, 6], "file")))
    assert (whole.silo, whole.round, whole.kept) == ("a", 8, (7, 6))
    assert [done for done in range(9) if whole.is_mended_from(done)] == [0, 6, 7]
    (none,) = said(str(DamagedStateError(8, [], "file")))
    assert [done for done in range(9) if none.is_mended_from(done)] == [0]
    (first,) = said(str(DamagedStateError(8, [0], "file")))
    assert [done for done in range(9) if first.is_mended_from(done)] == list(range(8))
    assert said(str(DamagedStateError(8, [9, 8, 3], "file")))[0].kept == (3,)
    assert (
        len(said(str(DamagedStateError(8, list(range(8)) * 9, "file")))[0].kept) <= MOST_STATES
    )
    for lie in (
        str(DamagedStateError(9, [7], "")),
        str(DamagedStateError(0, [], "")),
        f"its state of round {'9' * 99}",
    ):
        assert not said(lie)
    assert not said(str(whole.reason), node=2)


def test_a_second_run_of_the_same_name_leaves_the_first_ones_models_alone(two, tmp_path):
    """The attack: a server starts a run, of any length, under the name, method and seed of one that hospitals keep."""
    place = {"state_dir": tmp_path / "state", "strategy": "local"}
    federate(two, directory=tmp_path / "first/run", rounds=3, **place)
    before = {p: p.read_bytes() for p in (tmp_path / "state").rglob("*.safetensors")}
    assert len(before) == 4
    second = federate(two, directory=tmp_path / "second/run", rounds=1, **place)
    fresh = federate(two, strategy="local", rounds=1)
    assert comparable(second.rows) == comparable(fresh.rows)  # it takes none of them up
    assert {p: p.read_bytes() for p in before} == before
    resumed = federate(two, directory=tmp_path / "first/run", rounds=4, resume=True, **place)
    assert {round_of(m) for m, _ in resumed.grid.traffic} == {0, 4, 5}
    whole = federate(two, strategy="local", rounds=4)
    assert comparable(resumed.rows) == comparable(whole.rows)  # it went on with its own states


@pytest.mark.parametrize("run_id", ["../../../x", "/etc", "", "A" * 400, "0123456789abcdeF"])
def test_a_runs_id_is_no_way_out_of_the_state_directory(tmp_path, run_id):
    (tmp_path / "states").mkdir()
    (file,) = kept(store_of(tmp_path / "states", run_id=run_id), 1)
    assert [p.name for p in tmp_path.iterdir()] == ["states"]
    assert file.parent.parent == tmp_path / "states/run/fedavg-7/a"
    assert store_of(tmp_path / "states", run_id=run_id).load(2).arrays


@pytest.mark.parametrize("run", ["..", ".", "", "/etc", "../../up", "a/.."])
def test_a_run_is_no_way_out_of_the_state_directory(tmp_path, run):
    (tmp_path / "states").mkdir()
    kept(store_of(tmp_path / "states", run), 1)
    assert [p.name for p in tmp_path.iterdir()] == ["states"]
    assert len(list((tmp_path / "states").rglob("round-*.safetensors"))) == 1
