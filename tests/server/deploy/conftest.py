"""The federation of three silos that deployed tests share; it goes with the module that asked for it."""

from __future__ import annotations

import sys

import pytest
from trio import FEDERATION, bring_up

from client.protocol.launch import FLOWER
from server.deploy import processes
from server.deploy.local import record


def pytest_collection_modifyitems(items):
    if not sys.platform.startswith("linux"):
        for item in items:
            if item.get_closest_marker("deployed") and item.path.parent.name == "deploy":
                item.add_marker(pytest.mark.skip(reason="`silofl up` needs Linux"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Everything that is written lies here; all processes end with it."""
    folder = tmp_path_factory.mktemp("deployed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(folder / "state"))
        patch.setenv("FLWR_HOME", str(folder / "flower"))
        for key, value in FLOWER.items():
            patch.setenv(key, value)
        (folder / "federation.yaml").write_text(FEDERATION.format(name="trio"))
        yield folder
        processes.end(processes.find(record.state_root() / "trio"), grace=1.0)


@pytest.fixture(scope="module")
def federation(folder):
    return bring_up(folder)
