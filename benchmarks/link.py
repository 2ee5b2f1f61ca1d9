"""A link through proxies against gRPC's direct way: throughput, latency, and CPU of the hospital's end.

    python -m benchmarks.link [--megabytes 16] [--repeats 5] [--mbit 100]

One gRPC server with TLS gives back what it gets: directly, over a link in a WebSocket, and over a link of POSTs, in
turns. Throughput is of one message up and down; latency is the median of 100 calls of one byte; CPU is of the process
of the hospital's end, for each MB that it carried. `--mbit` puts the silo into a network of its own behind a line of
this rate (`tc tbf`), which needs root; without it all is on loopback, without a proxy.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent import futures
from functools import partial
from pathlib import Path
from typing import IO

import grpc  # type: ignore[import-untyped]

from benchmarks.common import interleaved, ratios, table
from client.link.local_end import Link
from client.protocol.node import Site
from server.deploy.credentials import Credentials, ensure_credentials
from server.deploy.relay import Relay, tls_of

NAME = "fl.example.org"
SERVER, SILO = "198.51.100.1", "198.51.100.2"
WAYS = ("direct", "websocket", "posts")
KEPT: list[grpc.Server] = []  # it ends when nothing refers to it
SIZES = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def made_in(folder: Path) -> Credentials:
    return ensure_credentials(folder, silos=("north",), hosts=("127.0.0.1", SERVER, NAME))


def serve(made: Credentials) -> tuple[int, int]:
    """Start the gRPC server and the relay in threads; return their ports."""
    pair = (made.server_key.read_bytes(), made.server_certificate.read_bytes())
    server = grpc.server(futures.ThreadPoolExecutor(4), options=SIZES)
    echo = grpc.unary_unary_rpc_method_handler(lambda data, context: data)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("x", {"Echo": echo}),)
    )
    port = server.add_secure_port("0.0.0.0:0", grpc.ssl_server_credentials([pair]))
    server.start()
    keys = [made.node_public_pem("north")]
    found, ready = list[int](), threading.Event()

    async def relay() -> None:
        context = tls_of(made.server_certificate, made.server_key)
        async with Relay(("127.0.0.1", port), lambda: keys).serve("0.0.0.0", 0, context) as one:
            found.append(next(iter(one.sockets)).getsockname()[1])
            ready.set()
            await server_ended.wait()

    server_ended = asyncio.Event()
    threading.Thread(target=lambda: asyncio.run(relay()), daemon=True).start()
    ready.wait()
    KEPT.append(server)
    return port, found[0]


def start_end(
    folder: Path, name: str, server: str, url: str, way: str
) -> tuple[subprocess.Popen[str], dict[str, str]]:
    """Start a hospital's end, with the credentials in a folder; return its process, and the variables for gRPC."""
    process = again(["end", name, server, url, way, "--folder", str(folder)])
    printed: IO[str] = process.stdout  # type: ignore[assignment]
    return process, json.loads(printed.readline())


def end(folder: Path, name: str, server: str, url: str, way: str) -> None:
    """Be the hospital's end until standard input ends."""
    made = Credentials(folder)
    site = Site(name, server, made.ca_certificate, made.node_key(name), Path(), Path())
    trusted = os.environ.get("VIA_CA") or made.ca_certificate
    with Link(url, site, Path(trusted)) as link:
        link.by_posts = way == "posts"
        print(json.dumps(link.environment), flush=True)
        sys.stdin.read()


def cpu(pid: int) -> float:
    """Return the CPU seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def measure(args: argparse.Namespace) -> None:
    """Measure from the silo's place, and print the table."""
    port, relay = sys.stdin.readline().split()
    ca = grpc.ssl_channel_credentials(made_in(args.folder).ca_certificate.read_bytes())
    server, name = f"{args.host}:{port}", NAME if "VIA_CA" in os.environ else args.host
    calls, ends = {}, {}
    for way in WAYS:
        proxy: tuple[str, object] = ("grpc.enable_http_proxy", 0)
        if way != "direct":
            url = f"https://{name}:{relay}/link"
            ends[way], variables = start_end(args.folder, "north", server, url, way)
            proxy = ("grpc.http_proxy", variables["grpc_proxy"])
        channel = grpc.secure_channel(server, ca, options=[*SIZES, proxy])
        calls[way] = channel.unary_unary("/x/Echo")
        calls[way](b"x", timeout=60)
    data = os.urandom(args.megabytes << 20)
    before = {way: cpu(one.pid) for way, one in ends.items()}
    times = interleaved({way: partial(calls[way], data) for way in WAYS}, args.repeats)
    carried = 2 * args.megabytes * (args.repeats + 1)
    used = {way: 1000 * (cpu(one.pid) - before[way]) / carried for way, one in ends.items()}
    waits = interleaved({way: partial(calls[way], b"x") for way in WAYS}, 100)
    latency = {way: 1000 * statistics.median(waits[way]) for way in WAYS}
    rows = [
        [way, f"{1 / over:.2f}", f"{latency[way] - latency['direct']:.2f}", f"{used.get(way, 0):.1f}"]
        for way, over in ratios(times, "direct").items()
    ]  # fmt: skip
    print(table(rows, ["way", "throughput, of direct", "more latency, ms", "CPU, ms a MB"]))
    for one in ends.values():
        one.communicate("", timeout=60)


def again(command: list[str], before: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """Start this module once more."""
    whole = [*before, sys.executable, "-m", "benchmarks.link", *command]
    return subprocess.Popen(whole, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def between(silo: int, mbit: int) -> None:
    """Lay a line of this rate from this network to that of a process."""
    line = f"tc qdisc add dev {{}} root tbf rate {mbit}mbit burst 64kb latency 50ms"
    there = f"nsenter -t {silo} -n "
    for command in (
        "ip link set lo up", there + "ip link set lo up", f"ip link add va type veth peer name vb netns {silo}",
        f"ip address add {SERVER}/24 dev va", "ip link set va up", line.format("va"),
        there + f"ip address add {SILO}/24 dev vb", there + "ip link set vb up", there + line.format("vb"),
    ):  # fmt: skip
        subprocess.run(command.split(), check=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", nargs="?", default="server", choices=["server", "silo", "end"])
    for option, default in (("megabytes", 16), ("repeats", 5), ("mbit", 0)):
        parser.add_argument(f"--{option}", type=int, default=default)
    parser.add_argument("--host", default="")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("of_end", nargs="*")
    args = parser.parse_args()
    if args.role == "end":
        return end(args.folder, *args.of_end)
    if args.role == "silo":
        return measure(args)
    if args.mbit and "SILOFL_OWN_NETWORK" not in os.environ:
        os.environ["SILOFL_OWN_NETWORK"] = "1"
        os.execvp(
            "unshare", ["unshare", "-n", sys.executable, "-m", "benchmarks.link", *sys.argv[1:]]
        )
    with tempfile.TemporaryDirectory() as folder:
        made = made_in(Path(folder))
        host = SERVER if args.mbit else "127.0.0.1"
        before = ("unshare", "-n") if args.mbit else ()
        silo = again(["silo", "--folder", folder, "--host", host, *sys.argv[1:]], before)
        if args.mbit:
            time.sleep(1)  # until it is in its network
            between(silo.pid, args.mbit)
        print(silo.communicate("{} {}\n".format(*serve(made)), timeout=1200)[0])


if __name__ == "__main__":
    main()
