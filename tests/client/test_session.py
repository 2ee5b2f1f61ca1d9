"""ClientSession: one for each message, which opens policy, data and state once."""

from collections import Counter

from tiny import federate

from client import app as answer
from client import session

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
