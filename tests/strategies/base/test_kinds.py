"""Every array and number of every method against its declared kind, in real messages: what moves as the data change.

With a learning rate of 1e-30 a step changes no float32. So what is trained is what the silo received, whatever its data
are; and what still moves as one value or one label changes is a statistic of the data. Its kind must say which.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import CASES, OPTIONS, K, typical
from tiny import federate, random_silos, round_of, rows_of, write_silo
from two_layers import DEEP, replies_of

from partitions.common.errors import UserError
from partitions.common.settings import keys_of
from strategies import strategies
from strategies.base.client import SiloClient
from strategies.base.info import METHOD, Sums
from strategies.base.transport.kinds import COLUMN_SUMS, CONTROL, MODEL, ClassMeans, ReleaseKind
from strategies.base.transport.payload import decode
from strategies.fednova import FedNovaClient
from strategies.fedproto import FedProtoClient

STILL = 1e-30
COLUMN, ROW = 1, 3  # the value that changes, of silo a
CHANGES = ("value", "label")


def changed(files, tmp_path, change):
    """The files, of which silo a's has one patient with another value in one column, or with another label."""
    x, y = rows_of(files["a"])
    assert len({*y}) == 3
    if change == "value":
        x[ROW, COLUMN] += 0.75
    else:
        y[ROW] = (y[ROW] + 1) % 3
    return {**files, "a": write_silo(tmp_path / f"{change}.npz", x, [*map(int, y)], 3)}


def messages(files, name, like=None):
    """Silo a's two rounds without learning: by round and name each array's or number's kind and values.

    And by round the content of its messages: of the run ``like`` in its place, so that what a server makes of the first
    round does not change the second.
    """
    settings = CASES[name][0]
    method = strategies()[settings["strategy"]]
    rates = [
        key
        for key, f in keys_of(method.Settings, method.info.name).items()
        if f.metadata["kind"] == "learning-rate"
    ]
    still = {"learning_rate": STILL, "momentum": 0.0, **dict.fromkeys(rates, STILL)}
    came = {}

    def before(silo, message, context):
        if silo == "a" and message.metadata.message_type == "train":
            number = round_of(message)
            came[number] = message.content
            if like is not None:
                message.content = like[number]

    run = federate(files, **{**DEEP, **OPTIONS, **settings, **still}, rounds=2, before=before)
    info = run.strategy.info
    found: dict[tuple[int, str], tuple[ReleaseKind, Any]] = {}
    for server_round, _, payload, _ in replies_of(run, "a"):
        assert list(payload.models) == list(run.strategy.upload_names())
        for key, model in payload.models.items():
            found[server_round, key] = info.kinds[key], model.vector.clone()
        for key, number in payload.numbers.items():
            found[server_round, f"number {key}"] = info.sends_numbers[key], number
    return run, found, came


def moved(kind, before, after, received):
    """Where an array or a number moved: indices of classes, of columns, or of values."""
    if not isinstance(before, torch.Tensor):
        return {0} if before != after else set()
    assert before.shape == after.shape and before.dtype == torch.float32
    differs = (before - after).abs() > 1e-12  # a bias of 0 may have made a step
    if kind.moves == "class" and kind.rows == "features":
        # The rows of the classes, each on a line from what was received, by a share that all data decide
        size = 3 * K
        lines = [(v[:size] - received[:size]).view(3, K) for v in (before, after)]
        return {*(torch.cosine_similarity(*lines) < 1 - 1e-5).nonzero().flatten().tolist()}
    if kind.moves == "class" and kind.rows == "table":
        differs = differs[: 3 * (K + 1)]
    if kind.moves == "class":
        differs = differs.view(3, -1).any(1)
    if kind.moves == "column":
        differs = differs.view(2, -1).any(0)
    return {*differs.nonzero().flatten().tolist()}


def faults(three, tmp_path, name, changes):
    """What moves beside what its kind says, and the names of what it says that moves and does not, for each change."""
    run, before, came = messages(three, name)
    uploads = run.strategy.upload_names()
    of = int(rows_of(three["a"])[1][ROW])
    for change in changes:
        _, after, _ = messages(changed(three, tmp_path, change), name, came)
        assert before.keys() == after.keys() and len({key[0] for key in before}) == 2 * bool(
            uploads
        )
        # With another label another number of samples, and so other shares of these two
        classes = {of, (of + 1) % 3} if change == "label" else {of}
        columns = {COLUMN} if change == "value" else set()
        may = {"": set(), "class": classes, "column": columns}
        wrong, right = [], set()
        for (server_round, key), (kind, values) in before.items():
            down = decode(came[server_round])[0].models.get(key)
            where = moved(kind, values, after[server_round, key][1], down and down.vector)
            if kind.moves != "all" and not where <= may[kind.moves]:
                wrong.append(f"{key} of round {server_round}: {sorted(where)}")
            right |= {key} if where else set()
        # What a kind says that moves, does: else nothing is compared here
        moves = {"class", "column"} if change == "value" else {"class"}
        still = {key for (_, key), (kind, _) in before.items() if kind.moves in moves} - right
        yield change, wrong, still


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    return random_silos(tmp_path_factory.mktemp("three"), [12, 10, 8])


@typical(CASES)
def test_what_moves_is_what_the_kind_says(three, tmp_path, name, tiny_bn):
    for change, wrong, still in faults(three, tmp_path, name, CHANGES):
        assert not wrong and not still, change


def mean_of_a_column(client):
    return float(client.silo.train.take(slice(None))[0][:, COLUMN].mean())


def planted_in_a_model(client):
    client.train()
    vector = client.model.vector.clone()
    vector[5] = mean_of_a_column(client)
    return [vector]


def planted_in_a_number(client):
    client.replies["steps"] = 1 + int(1000 * mean_of_a_column(client)) % 4
    return [client.model.vector.clone()]


def planted_in_a_class(client, update=FedProtoClient.local_update):
    table = update(client)[0].clone()
    for row in table.view(3, -1):
        row[0] = mean_of_a_column(client)
    return [table]


@pytest.mark.parametrize(
    ("name", "client", "planted", "where"),
    [
        ("fedavg", SiloClient, planted_in_a_model, "model of round 1: [5]"),
        ("fednova", FedNovaClient, planted_in_a_number, "number steps of round 1: [0]"),
        ("fedproto", FedProtoClient, planted_in_a_class, "prototypes of round 1: [0, 1, 2]"),
    ],
)
def test_a_planted_mean_of_a_column_is_caught(
    three, tmp_path, monkeypatch, name, client, planted, where
):
    monkeypatch.setattr(client, "local_update", planted)
    ((_, wrong, _),) = faults(three, tmp_path, name, ["value"])
    assert wrong and wrong[0].startswith(where)


def test_an_array_or_a_number_without_a_kind_does_not_leave(three, monkeypatch):
    """Not even where server and silo agree on it: the silo's own app refuses it."""
    monkeypatch.setattr(SiloClient, "upload_names", lambda self: ("model", "column"))
    monkeypatch.setattr(
        SiloClient,
        "local_update",
        lambda self: [self.model.vector.clone(), torch.tensor([mean_of_a_column(self)])],
    )
    with pytest.raises(RuntimeError, match="SiloClient may not send 'column': it has no kind"):
        federate(three, "fedavg", **DEEP, rounds=1)


def test_neither_noise_nor_masks_for_a_kind_that_they_do_not_fit():
    with pytest.raises(
        UserError, match="mine: neither noise nor masks fit the kind of 'inputs'"
    ):
        METHOD(name="mine", title="", paper="", uploads={"inputs": COLUMN_SUMS}, sums=Sums())
    with pytest.raises(UserError, match="neither noise nor masks fit the kind of 'means'"):
        METHOD(
            name="mine", title="", paper="", uploads={"means": ClassMeans("")}, dp="gradient"
        )
    assert METHOD(
        name="mine", title="", paper="", uploads={"a": MODEL, "b": CONTROL}, sums=Sums("silos")
    ).whole
