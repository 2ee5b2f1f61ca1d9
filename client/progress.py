"""The progress of a run at one hospital: events of its own silo, for ``silofl watch`` there.

    STATE_DIR/RUN/STRATEGY-SEED/SILO/run-ID/progress.jsonl

The lines are like those of the server's ``progress.jsonl``, for this silo only. They stay at the site, so they contain
its scores even if the policy withholds them from the server. A failure to write a line does not stop a round.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, MessageType, RecordDict

from client.flower.messages import config_of
from client.local_data import silo_name
from client.session import ClientSession
from client.store import StateStore
from partitions.common.files import append, make_folder
from strategies.base.newcomers import NEWCOMER
from strategies.base.run_settings import RunSettings
from strategies.base.transport.payload import wire_bytes
from strategies.base.transport.reporting import EPSILON

LARGEST = 1 << 23  # bytes of a file, after which it is restarted


class OwnProgress:
    """The events of one message; none are written in a simulation, where the server's file has all."""

    def __init__(self, session: ClientSession, message: Message) -> None:
        self.session = session
        self.message = message
        self.kind = message.metadata.message_type
        self.started = time.time()
        self.closing = False
        self.folder: Path | None = None

    def begins(self) -> None:
        """Note that this silo has begun with a message; the run's folder is known from here on.

        Nothing is written if a run only evaluates, or if the silo is a newcomer.
        """
        store = self.session.store
        config = self.session.config
        if NEWCOMER in config or not self.session.info.trains:
            return
        if "state-dir" not in store.context.node_config or store.folder is None:
            return
        self.folder = store.folder
        self.closing = self.kind == MessageType.EVALUATE and not config["personal"]
        rounds = self.session.settings.common.rounds
        number = config["round"] - self.closing
        kinds = {self.session.name: self.kind}
        self._add(
            "begin",
            number=number,
            rounds=rounds,
            closing=self.closing,
            time=self.started,
            silos=kinds,
        )

    def ends(self, server_round: int, metrics: Mapping[str, Any], sent: RecordDict) -> None:
        """Note the round's scores, and the bytes of the vectors sent and received."""
        if self.folder is None:
            return
        score = self.session.silo.task.score
        snapshot = self.session.info.reports
        values = {
            part: metrics.get(f"{snapshot}.{part}.{score}", math.nan)
            for part in ("val", "test")
        }
        scores = {part: float(value) for part, value in values.items() if math.isfinite(value)}
        down = wire_bytes(self.message.content)
        up = wire_bytes(sent)
        common = {"score": score, "per_silo": {self.session.name: scores}}
        if self.closing:
            self._add("closed", number=server_round - 1, **common)
            self._add("done")
            return
        seconds = time.time() - self.started
        rounds = self.session.settings.common.rounds
        self._add("reply", silo=self.session.name, seconds=seconds)
        size = {"bytes": down + up, "bytes_down": down, "bytes_up": up}
        if EPSILON in metrics:
            common["epsilon"] = {self.session.name: float(metrics[EPSILON])}
        self._add("round", round=server_round, rounds=rounds, seconds=seconds, **size, **common)

    def _add(self, event: str, **values: Any) -> None:
        if self.folder is not None:
            common = self.session.settings.common
            with contextlib.suppress(OSError):
                make_folder(self.folder)
                add_event(
                    self.folder, event, strategy=common.strategy, seed=common.seed, **values
                )


def note_failure(
    message: Message, context: Context, settings: RunSettings, reason: str
) -> None:
    """Note why a message has failed, if its run has begun here; otherwise nothing is written.

    The message may lack anything; the cause is also in the silo's log and in its audit log.
    """
    if "state-dir" not in context.node_config:
        return
    with contextlib.suppress(OSError, KeyError, TypeError, ValueError):
        config = config_of(message)
        store = StateStore(context, str(config["run"]), settings.run_key, str(config["run_id"]))
        if store.folder is not None and store.folder.is_dir():
            when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            which = {"strategy": settings.common.strategy, "seed": settings.common.seed}
            add_event(
                store.folder,
                "left_out",
                **which,
                silo=silo_name(context),
                time=when,
                message=reason,
            )


def add_event(folder: Path, event: str, **values: Any) -> None:
    """Add a line to a run's events; a file that is too large is restarted. Raises OSError."""
    file = folder / "progress.jsonl"
    if file.exists() and file.stat().st_size > LARGEST:
        file.unlink()
    append(file, json.dumps({"event": event, **values}) + "\n", durable=False)
