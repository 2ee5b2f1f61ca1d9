"""Whether the privacy budget of the people in the data allows a training message: it is charged before the answer.

Messages without differential privacy cost nothing here; nor do evaluations, since they do not train.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from ...flower.messages import ArraySum, array_sums, config_of, records_of
from ...protocol.chain import digest
from ...protocol.parsed import SiteError
from ..budget.accounting import MessageCost, cost_of, data_file
from ..budget.ledger import Ledger, Release, SpentEpsilon
from ..message import SiteMessage, whole

MOST_TEXT = 100  # characters of the server's names in the ledger


@dataclass(frozen=True)
class Charge:
    """A message that was charged, and the epsilon that was spent before."""

    release: Release
    before: float


def budget_fault(message: SiteMessage) -> str:
    """Charge a message's cost to its cohort; return why the budget does not allow it, or nothing can be charged."""
    if not message.charged:
        return ""
    try:
        message.passage.charge = charge_message(message)
    except SiteError as error:
        return str(error)
    except OSError as error:
        return f"the ledger cannot be written: {error.strerror}"
    return ""


def charge_message(message: SiteMessage) -> Charge | None:
    """Charge a message, and return what its reply needs; None if it has no noised step. Raises SiteError, OSError."""
    if not message.cohort:
        raise SiteError("its data file cannot be read, so no cost can be charged")
    assert message.data is not None
    state, config, policy = message.log.parent, message.config, message.terms.rules
    data = data_file(state, message.cohort, message.silo, message.data)
    cost = cost_of(message.settings, data)
    if not cost.steps:
        return None
    release = Release(
        key=message_key(message, cost),
        silo=message.silo,
        run_id=str(config.get("run_id") or message.run)[:MOST_TEXT],
        run=str(config.get("run", ""))[:MOST_TEXT],
        round=whole(config.get("round")),
        data=data,
        cost=cost,
    )
    attended = whole(config.get("attended"))
    return Charge(release, Ledger(state).charge(release, policy, attended).before)


def note_charged(reply: Any, message: SiteMessage) -> SpentEpsilon | None:
    """Note a reply before it leaves; return what was spent before its message was charged, and after it.

    Raises SiteError if the reply differs from the one that left before, and costs too much.
    """
    charge = message.passage.charge
    if charge is None or reply.has_error():
        return None
    content = message.passage.content or content_of(reply)
    ledger, rules = Ledger(message.log.parent), message.terms.rules
    return replace(ledger.note_reply(charge.release, content, rules), before=charge.before)


def message_key(message: SiteMessage, cost: MessageCost) -> str:
    """Return a key that is equal for repetitions of a message, and differs for any other.

    It covers all that the cost and the released numbers depend on: Flower's own number of the run, every setting with
    its type, the whole message (with its run and round), the data file, and the cost.
    """
    run = message.run, sorted(message.settings.items())
    values = [
        (kind.lower(), name, sorted(record.items()))
        for kind in ("Config", "Metric")
        for name, record in sorted(records_of(message.message.content, kind).items())
    ]
    sent = message.action, arrays_of(message.arrays), values
    return digest(repr((run, sent, message.cohort, sorted(asdict(cost).items()))).encode())


def arrays_of(arrays: Iterable[ArraySum]) -> list[tuple[object, ...]]:
    """Return every array of a message: its place, type, shape, form and SHA-256."""
    return [array[:6] for array in sorted(arrays)]


def content_of(reply: Any) -> str:
    """Return the SHA-256 of a reply's arrays and of the method's numbers in it."""
    config = sorted(config_of(reply).items())
    numbers = [(key, value) for key, value in config if key.startswith("number.")]
    return digest(repr((arrays_of(array_sums(reply.content)), numbers)).encode())
