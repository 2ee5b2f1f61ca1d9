"""What the processes of a federation on one machine are started with."""

from __future__ import annotations

import socket

import pytest

from client.site.runtime import launch
from client.site.runtime.launch import LOOPBACK, PORTS, free_ports


def test_ports_are_free_and_none_that_an_outgoing_connection_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = free_ports(200)
    assert len(set(ports)) == 200 and set(ports) <= set(PORTS)
    with socket.create_server((LOOPBACK, 0)) as server, socket.create_connection(server.getsockname()) as connection:
        assert connection.getsockname()[1] not in PORTS
    with socket.create_server((LOOPBACK, ports[0])):
        monkeypatch.setattr(launch, "PORTS", range(ports[0], ports[0] + 1))
        with pytest.raises(OSError, match="no 1 free ports"):
            free_ports(1)
