"""A message to this site, parsed once: every rule, the answer and the line of the audit log go by these values."""

import contextlib
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from ..flower.messages import ArraySum, array_sums, config_of
from ..protocol.chain import write_whole
from ..protocol.launch import flower_home
from ..protocol.ours import files
from ..protocol.run_settings import is_private
from ..protocol.secure import RECORD
from .terms import Terms, read_terms


@dataclass
class Passage:
    """What a message has passed, and what its rules leave for the reply.

    ``line``: of the audit log, as far as it is known before the rules; ``content``: SHA-256 of the app's reply before
    masks, which differ where a message is repeated.
    """

    line: dict[str, Any] = field(default_factory=dict)
    allowed: bool = False
    receipt: dict[str, Any] | None = None  # the log's entry about the server's receipt
    masks: Any = None  # `SecureMessage`
    charge: Any = None  # `Charge`
    content: str = ""


@dataclass(frozen=True)
class SiteMessage:
    """A message to this silo. The server chooses all of it but silo, data, folders, day and terms."""

    message: Any  # Flower's
    context: Any
    build: str  # SHA-256 of the app
    terms: Terms
    silo: str
    action: str  # Flower's type of the message, as query.survey
    kind: str  # its first word: train, evaluate or query
    run: int  # Flower's number
    config: Mapping[str, Any]
    settings: Mapping[str, Any]  # of the run
    masked: Mapping[str, Any]  # its record of secure aggregation
    data: Path | None  # the silo's own file; None: it has none, as in a simulation
    state: Path | None  # the state directory
    log: Path  # the folder of the audit log
    day: date
    app: tuple[str, ...] = ()  # the sums of the app's build, once it was compared with the pins
    passage: Passage = field(default_factory=Passage)

    @functools.cached_property
    def cohort(self) -> str:
        """SHA-256 of the silo's data file, which identifies the people behind a reply; empty: unreadable."""
        return data_sha256(self.context.node_config)

    @functools.cached_property
    def arrays(self) -> list[ArraySum]:
        """The sum of each array of the message."""
        return array_sums(self.message.content)

    @property
    def public(self) -> bool:
        """Whether the silo has nothing to protect: no data file of its own, or public data."""
        return self.data is None or self.terms.rules.public

    @property
    def charged(self) -> bool:
        """Whether it costs something of a privacy budget: it trains with differential privacy, on data to protect."""
        return self.kind == "train" and is_private(self.settings) and not self.public


def read_message(
    message: Any, context: Any, build: str = "", terms: Terms | None = None
) -> SiteMessage:
    """Parse a message, and take its record of secure aggregation out. ``terms``: None to read them."""
    node, action = dict(context.node_config), str(message.metadata.message_type)
    has_content = message.has_content()
    return SiteMessage(
        message=message,
        context=context,
        build=build,
        terms=terms or read_terms(node, context.run_config),
        silo=str(node.get("name", "this silo")),
        action=action,
        kind=action.partition(".")[0],
        run=int(context.run_id),
        config=config_of(message),
        settings=context.run_config,
        masked={**message.content.pop(RECORD, {})} if has_content else {},
        data=Path(str(node["data"])) if "data" in node else None,
        state=Path(str(node["state-dir"])) if node.get("state-dir") else None,
        log=log_folder(node),
        day=datetime.now(UTC).date(),
    )


def log_folder(node_config: Mapping[str, Any]) -> Path:
    """Return the folder of a silo's log: in its state directory, or in Flower's own folder if it has none."""
    if "state-dir" in node_config:
        return Path(str(node_config["state-dir"])) / "audit"
    return flower_home() / "audit"


def data_sha256(node_config: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the silo's data file; empty: it cannot be read.

    It is cached in a file beside the log until the data file's size or time changes.
    """
    path = Path(str(node_config.get("data", "")))
    note = log_folder(node_config) / "data.json"
    try:
        stat = path.stat()
        known = {"path": str(path), "size": stat.st_size, "time": stat.st_mtime_ns}
        with contextlib.suppress(OSError, ValueError, AttributeError):
            noted = json.loads(note.read_text(encoding="utf-8"))
            if known.items() <= noted.items():
                return str(noted["sha256"])
        sha256: str = files.file_sum(path)
        files.make_folder(note.parent, 0o700)
        write_whole(note, json.dumps({**known, "sha256": sha256}) + "\n")
        return sha256
    except OSError:
        return ""


def whole(value: object) -> int:
    """Return an integer of a message; 0 for any other value."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
