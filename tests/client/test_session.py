"""ClientSession: one for each message, which opens policy, data and state once."""

from collections import Counter
from typing import Any

import pytest
from flwr.app import Context, RecordDict
from tiny import federate, settings_of

from client import app as answer
from client import session
from client.local_data import check_devices, device_of
from partitions.common.errors import UserError

OPENED = ("open_data", "device_of", "StateStore")


def test_a_message_has_one_session_which_opens_everything_once(three, monkeypatch):
    calls = Counter[str]()

    def count(module, name):
        original = getattr(module, name)

        def counted(*args, **options):
            calls[name] += 1
            return original(*args, **options)

        monkeypatch.setattr(module, name, counted)

    count(answer, "ClientSession")
    count(answer, "read_terms")
    for name in OPENED:
        count(session, name)
    run = federate(three, strategy="apple", rounds=2)
    messages = len(run.grid.traffic)
    assert calls["ClientSession"] == calls["read_terms"] == messages > 9
    assert all(0 < calls[name] <= messages for name in OPENED), calls


TWO = ("cuda:0", "cuda:1")


@pytest.mark.parametrize(
    ("changes", "task", "reason"),
    [
        ({"strategy": "moon"}, "multiclass", "moon, whose loss depends on features"),
        ({"dp": True}, "multiclass", "dp = true, which shortens each patient's gradient"),
        (
            {"trainer": "loop:train"},
            "multiclass",
            "trainer = loop:train, which makes the steps",
        ),
        ({}, "survival", "survival, whose loss compares the samples of a batch"),
    ],
)
def test_what_several_devices_cannot_divide_is_refused(three, changes, task, reason):
    settings = settings_of(three, **changes)
    with pytest.raises(UserError, match=f"device = cuda:0,cuda:1: not for {reason}"):
        check_devices(settings, task, TWO)
    check_devices(settings, task, TWO[:1])
    check_devices(settings_of(three), "multiclass", TWO)


def test_several_devices_need_our_processes_and_are_not_the_servers_to_ask(three, monkeypatch):
    settings = settings_of(three, device="cpu,cpu")
    node: dict[str, Any] = {"device": "cpu,cpu"}
    with pytest.raises(
        UserError, match="several devices need the processes of silofl's SuperNode"
    ):
        device_of(settings, Context(1, 2, node, RecordDict(), {}))
    with pytest.raises(UserError, match="device 'cpu,cpu' is unknown"):
        device_of(settings, Context(1, 2, {}, RecordDict(), {}))
    monkeypatch.setenv("SILOFL_GROUP", "1 /folder")
    assert device_of(settings, Context(1, 2, node, RecordDict(), {})).type == "cpu"
