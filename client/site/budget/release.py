"""The budget's gate for training messages with differential privacy: before the answer, and before the reply leaves.

Messages without differential privacy cost nothing here; nor do evaluations, since they do not train.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ...flower.contents import array_sums, config_of, records_of
from ...protocol.chain import digest
from ...protocol.parsed import SiteError
from ...protocol.policy import Policy, PolicyRefusedError
from ...protocol.run_settings import is_private
from .accounting import MessageCost, cost_of, data_file
from .ledger import Ledger, Release, SpentEpsilon

MOST_TEXT = 100  # characters of the server's names in the ledger


@dataclass(frozen=True)
class Charged:
    """A message that was charged, the policy then, and the epsilon that was spent before.

    ``content``: of the reply before masks, which differ where it is repeated; empty: of the reply as it leaves.
    """

    release: Release
    policy: Policy
    before: float
    content: str = ""


def charge(
    message: Any, context: Any, policy: Policy, sha256: str, state: Path
) -> Charged | None:
    """Charge a message's cost to its cohort; return what `note_charged` needs of it, None if it costs nothing.

    ``sha256``: of the silo's data file; ``state``: the folder of the ledger. Raises PolicyRefusedError, one line, if
    the budget does not allow it, or if nothing can be charged.
    """
    node = context.node_config
    run = context.run_config
    if message.metadata.message_type.partition(".")[0] != "train" or not is_private(run):
        return None
    silo = str(node.get("name", "this silo"))
    config = config_of(message)
    try:
        if not sha256:
            raise SiteError("its data file cannot be read, so no cost can be charged")
        data = data_file(state, sha256, silo, Path(str(node["data"])))
        cost = cost_of(run, data)
        if not cost.steps:
            return None
        release = Release(
            key=key_of(message, context, sha256, cost),
            silo=silo,
            run_id=str(config.get("run_id") or int(context.run_id))[:MOST_TEXT],
            run=str(config.get("run", ""))[:MOST_TEXT],
            round=whole(config.get("round")),
            data=data,
            cost=cost,
        )
        return Charged(
            release,
            policy,
            Ledger(state).charge(release, policy, whole(config.get("attended"))).before,
        )
    except SiteError as error:
        raise PolicyRefusedError(f"{silo} refuses: {error}") from None
    except OSError as error:
        raise PolicyRefusedError(
            f"{silo} refuses: the ledger cannot be written: {error.strerror}"
        ) from None


def note_charged(reply: Any, charged: Charged, state: Path) -> SpentEpsilon:
    """Note a reply before it leaves; return what was spent before its message was charged, and after it.

    Raises SiteError if the reply differs from the one that left before, and costs too much.
    """
    content = charged.content or content_of(reply)
    spent = Ledger(state).note_reply(charged.release, content, charged.policy)
    return replace(spent, before=charged.before)


def key_of(message: Any, context: Any, sha256: str, cost: MessageCost) -> str:
    """Return a key that is equal for repetitions of a message, and differs for any other.

    It covers all that the cost and the released numbers depend on: Flower's own number of the run, every setting with
    its type, the whole message (with its run and round), the data file, and the cost.
    """
    run = int(context.run_id), sorted(context.run_config.items())
    asked = message.metadata.message_type, arrays_of(message), _values(message)
    return digest(repr((run, asked, sha256, sorted(asdict(cost).items()))).encode())


def content_of(reply: Any) -> str:
    """Return the SHA-256 of a reply's arrays and of the method's numbers in it."""
    numbers = [
        (key, value)
        for key, value in sorted(config_of(reply).items())
        if key.startswith("number.")
    ]
    return digest(repr((arrays_of(reply), numbers)).encode())


def whole(value: object) -> int:
    """Return an integer of a message; 0 for any other value."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def arrays_of(message: Any) -> list[tuple[object, ...]]:
    """Return every array of a message: its place, type, shape, form and SHA-256."""
    return [one[:6] for one in sorted(array_sums(message.content))]


def _values(message: Any) -> list[tuple[object, ...]]:
    """Return every other value of a message, by its record."""
    return [
        (kind.lower(), name, sorted(record.items()))
        for kind in ("Config", "Metric")
        for name, record in sorted(records_of(message.content, kind).items())
    ]
