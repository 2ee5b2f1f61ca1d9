"""What the processes of a federation on one machine are started with."""

from __future__ import annotations

import socket

import httpx
import pytest
from failing import fails

from client.protocol import launch
from client.protocol.launch import LOOPBACK, PORTS, environment, free_ports, reach_without_proxy
from partitions.common.errors import UserError
from server.deploy.control import Connection, Control


def test_ports_are_free_and_none_that_an_outgoing_connection_gets(monkeypatch):
    ports = free_ports(200)
    assert len(set(ports)) == 200 and set(ports) <= set(PORTS)
    with (
        socket.create_server((LOOPBACK, 0)) as server,
        socket.create_connection(server.getsockname()) as connection,
    ):
        assert connection.getsockname()[1] not in PORTS
    with socket.create_server((LOOPBACK, ports[0])):
        monkeypatch.setattr(launch, "PORTS", range(ports[0], ports[0] + 1))
        fails(OSError, "no 1 free ports", free_ports, 1)


def test_a_sites_proxy_is_for_other_machines(monkeypatch):
    for name in ("http_proxy", "https_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://no.such.proxy:3128")
    monkeypatch.setenv("NO_PROXY", "inside.example")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("no_grpc_proxy", "other.example")
    made = environment()
    assert made["no_proxy"] == made["NO_PROXY"] == "inside.example,127.0.0.1,localhost,::1"
    assert made["no_grpc_proxy"] == "other.example,127.0.0.1,localhost,::1"
    assert reach_without_proxy(made, "control") == "" and made["no_proxy"].endswith(
        ",::1,control"
    )
    assert made["http_proxy"] == "http://no.such.proxy:3128"
    with Control(Connection("here", f"{LOOPBACK}:1", insecure=True)) as control:
        client = control._calls.client._client
        for host in ("127.0.0.1", "localhost", "[::1]", "inside.example"):
            assert client._transport_for_url(httpx.URL(f"http://{host}:1")) is client._transport
        assert (
            client._transport_for_url(httpx.URL("http://elsewhere.example"))
            is not client._transport
        )
        with pytest.raises(
            ConnectionError, match=r"no answer from the SuperLink at 127\.0\.0\.1:1 .*refused"
        ):
            control.nodes()


def test_a_proxy_of_another_kind(monkeypatch):
    """httpx has none for it, so each client would fail; the line names the variable, not its value."""
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ALL_PROXY", "socks5://me:secret@no.such.proxy:1080")
    with pytest.raises(
        UserError, match=r"^ALL_PROXY: silofl reaches far\.example:80 directly or through"
    ) as error:
        Control(Connection("far", "far.example:80", insecure=True))
    assert "secret" not in str(error.value)
    monkeypatch.setenv("ALL_PROXY", "socks5://no.such.proxy:1080")
    Control(Connection("here", f"{LOOPBACK}:1", insecure=True)).__exit__()
    monkeypatch.setenv("ALL_PROXY", "socks5://no.such.proxy:1080")
    assert "ALL_PROXY" not in environment()
