"""HTTP server of ``silofl watch``: page, event stream, metrics in Prometheus's text format, health."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
import sys
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from partitions.common.errors import UserError
from server.rendering import fill
from server.watch.access import LOOPBACK, Guard, Token
from server.watch.source import WatchSource

POLL_SECONDS = 0.2
PING_SECONDS = 10.0  # interval of the line that keeps a stream without changes alive
RETRY_MS = 1000  # delay before a browser reopens a stream that has ended


class Follower:
    """Poller of the source, which notifies the streams when the picture has changed."""

    def __init__(self, source: WatchSource) -> None:
        self.source = source
        self.fault = ""  # why the source cannot be read
        self.text = ""  # the last picture, without its time
        self.number = 0
        self.changed = asyncio.Condition()

    async def follow(self) -> None:
        while True:
            self.poll()
            async with self.changed:
                if self.text != (text := self.picture_text()):
                    self.text = text
                    self.number += 1
                    self.changed.notify_all()
            await asyncio.sleep(POLL_SECONDS)

    def poll(self) -> None:
        try:
            self.source.poll()
            self.fault = ""
        except OSError as error:
            self.fault = f"{self.source.folder} cannot be read: {error.strerror}"

    def picture(self) -> dict[str, Any]:
        return {**self.source.picture(), "fault": self.fault}

    def picture_text(self) -> str:
        """Return the picture as text without the time, whose change alone is not sent."""
        return json.dumps({**self.picture(), "now": 0}, allow_nan=False)

    async def stream(self) -> AsyncIterator[str]:
        """Yield server-sent events: the whole picture at the start and after each change."""
        yield f"retry: {RETRY_MS}\n\n"
        seen = -1
        while True:
            if seen != self.number:
                seen = self.number
                yield f"id: {seen}\ndata: {json.dumps(self.picture(), allow_nan=False)}\n\n"
            async with self.changed:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.changed.wait(), PING_SECONDS)
            if seen == self.number:
                yield ": no news\n\n"


def content_policy(nonce: str) -> str:
    """Return the Content-Security-Policy: only this page's style and script, and requests to its own origin."""
    source = f"'nonce-{nonce}'"
    return (
        f"default-src 'none'; script-src {source}; style-src {source}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def watch_app(source: WatchSource, token: str = "") -> Starlette:
    """Return the ASGI application. ``token``: required from readers; empty: only loopback names are answered."""
    follower = Follower(source)
    nonce = secrets.token_urlsafe(16)

    async def index(request: Request) -> Response:
        return HTMLResponse(fill("watch/page.html", nonce=nonce))

    async def events(request: Request) -> Response:
        return StreamingResponse(follower.stream(), media_type="text/event-stream")

    async def metrics(request: Request) -> Response:
        return Response(exposition(follower.picture()), media_type=CONTENT_TYPE)

    async def health(request: Request) -> Response:
        status = "source unreadable" if follower.fault else "ok"
        return JSONResponse({"status": status}, 503 if follower.fault else 200)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(follower.follow())
        try:
            yield
        finally:
            task.cancel()

    routes = [
        Route(f"/{name}", answer)
        for name, answer in (("", index), ("events", events), ("metrics", metrics))
    ]
    routes.append(Route("/health", health))
    guard = Middleware(Guard, token=token, csp=content_policy(nonce))
    return Starlette(routes=routes, middleware=[guard], lifespan=lifespan)


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0: a free one. Raises UserError if the address cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen()  # before the address is printed, so that an early reader waits and is not refused
    except (OSError, OverflowError) as error:
        listening.close()
        why = getattr(error, "strerror", None) or error
        raise UserError(
            f"cannot listen on {host}, port {port}: {why}; another one by --port, or --port 0"
        ) from None
    return listening


def serve(source: WatchSource, host: str, port: int, token: Token) -> None:
    """Serve until Ctrl-C; print one line with the address first."""
    with listen(host, port) as listening:
        serve_app(watch_app(source, token.text), listening, host, token)


def serve_app(app: Starlette, listening: socket.socket, host: str, token: Token) -> None:
    """Serve an application until Ctrl-C; print one line with the address first. Requests are not logged."""
    name = f"[{host}]" if ":" in host else host
    print(token.address(f"http://{name}:{listening.getsockname()[1]}/"), flush=True)
    if token.file is not None:
        print(
            f"readers need ?token=TOKEN behind it, or a header, with the token in {token.file}",
            file=sys.stderr,
        )
    if host not in LOOPBACK:
        print(
            "the line to this page is not encrypted; ssh -L, or a proxy with TLS, does that",
            file=sys.stderr,
        )
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, ws="none"
    )
    config.timeout_graceful_shutdown = 1  # streams do not end by themselves
    uvicorn.Server(config).run(sockets=[listening])


# --- metrics in Prometheus's text format ---

STATES = ("waiting", "running", "done", "failed")
RUN = ["strategy", "seed"]
EXPIRY = "silofl_certificate_expiry_timestamp_seconds", "when a certificate ends, Unix time"
OF_RUNS = {
    "round": ("silofl_run_rounds_done", "rounds that are done"),
    "rounds": ("silofl_run_rounds_planned", "rounds that are planned"),
    "best_round": ("silofl_run_best_round", "round with the best mean validation score so far"),
    "best_validation": (
        "silofl_run_best_validation_score",
        "mean validation score of that round",
    ),
    "best_test": ("silofl_run_best_test_score", "mean test score of that round"),
    "gain": (
        "silofl_run_gain_over_local",
        "mean gain over a finished run of the method local, same seed",
    ),
}
OF_CURRENT = {
    "took": ("silofl_elapsed_seconds", "seconds of all rounds so far"),
    "pace": ("silofl_round_seconds", "mean seconds of the last rounds"),
    "left": ("silofl_remaining_seconds", "estimated seconds to the end"),
}
OF_SILOS = {
    "waits": ("silofl_silo_asked", "1 while the silo's reply is awaited"),
    "is_late": ("silofl_silo_late", "1 while the silo is late"),
    "is_left_out": ("silofl_silo_left_out", "1 if the last round went on without the silo"),
    "missed": ("silofl_silo_rounds_missed", "rounds that went on without the silo"),
    "seconds": ("silofl_silo_reply_seconds", "seconds that the silo's last reply took"),
    "gain": (
        "silofl_silo_gain_over_local",
        "test score minus that of a finished run of local, same seed",
    ),
    "epsilon": (
        "silofl_silo_epsilon",
        "privacy budget that the silo has spent, where it reports it",
    ),
}
# Values of the labels, value; None: no sample
Samples = Iterable[tuple[Sequence[str], float | None]]


def exposition(picture: Mapping[str, Any]) -> bytes:
    """Return the metrics of each run, and of the silos of the current run."""
    registry = CollectorRegistry()
    registry.register(PictureCollector(picture))
    return generate_latest(registry)


@dataclass(eq=False)
class PictureCollector(Collector):
    """Collector of prometheus-client over one picture."""

    picture: Mapping[str, Any]

    def collect(self) -> Iterator[Metric]:
        """Yield every metric; an unknown value has no sample."""
        runs, run = self.picture["runs"], self.picture["run"]
        readable = "silofl_source_readable", "1 while the run's progress.jsonl can be read"
        yield gauge(readable, [], [((), not self.picture["fault"])])
        ends = (([end["certificate"]], end["ends"]) for end in self.picture["certificates"])
        yield gauge(EXPIRY, ["certificate"], ends)
        states = (
            ([*which(each), name], each["state"] == name) for each in runs for name in STATES
        )
        yield gauge(
            ("silofl_run_state", "1 for the state that a run is in"), [*RUN, "state"], states
        )
        for key, about in OF_RUNS.items():
            yield gauge(about, RUN, [(which(each), each[key]) for each in runs])
        if run is None:
            return
        sent = CounterMetricFamily(
            "silofl_payload_bytes", "bytes of models sent so far", labels=[*RUN, "direction"]
        )
        for direction in ("down", "up"):
            sent.add_metric([*which(run), direction], run[f"bytes_{direction}"])
        yield sent
        for key, about in OF_CURRENT.items():
            yield gauge(about, RUN, [(which(run), run[key])])
        parts = [
            ([*which(run), silo["name"], p], silo[p])
            for silo in run["silos"]
            for p in ("validation", "test")
        ]
        yield gauge(
            ("silofl_silo_score", "last score of a silo's part"), [*RUN, "silo", "part"], parts
        )
        silos = [{**silo, **flags(silo)} for silo in run["silos"]]
        for key, about in OF_SILOS.items():
            yield gauge(
                about,
                [*RUN, "silo"],
                [([*which(run), silo["name"]], silo[key]) for silo in silos],
            )


def gauge(about: tuple[str, str], labels: Sequence[str], samples: Samples) -> Metric:
    family = GaugeMetricFamily(*about, labels=labels)
    for values, value in samples:
        if value is not None:
            family.add_metric(values, float(value))
    return family


def flags(silo: Mapping[str, Any]) -> dict[str, bool]:
    doing = silo["doing"]
    return {
        "waits": doing != "",
        "is_late": doing == "late",
        "is_left_out": silo["left_out"] != "",
    }


def which(run: Mapping[str, Any]) -> list[str]:
    return [run["strategy"], str(run["seed"])]
