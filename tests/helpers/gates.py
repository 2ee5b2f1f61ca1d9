"""Parts of a hospital's gate by themselves: a message that is counted, and one whose reply is released."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

from flwr.app import Context, Message

from client.protocol.policy import Policy
from client.protocol.study import StudyProtocol
from client.site.gate import check_rules
from client.site.message import SiteMessage, read_message
from client.site.release import describe_message
from client.site.rules.counts import counts_fault
from client.site.terms import Terms

SENT: dict[str, Any] = {
    "message": None,
    "context": None,
    "build": "",
    "config": {},
    "settings": {"strategy": "local"},  # of which nothing is asked but the numbers
    "masked": {},
    "data": Path("data.npz"),
}


def count_message(
    policy: Policy,
    study: StudyProtocol | None,
    state: Any,
    run: str,
    silo: str,
    kind: str,
    day: str,
) -> None:
    """Have a message counted by the rule ``counts`` alone."""
    place = Path(str(state)) if state else None
    message = SiteMessage(
        **SENT,
        terms=Terms(policy, study),
        silo=silo,
        action=kind,
        kind=kind,
        run=int(run),
        state=place,
        log=(place or Path()) / "audit",
        day=date.fromisoformat(day),
    )
    check_rules(message, [counts_fault])


def described(
    message: Message, context: Context, terms: Any, *, allowed: bool = True
) -> SiteMessage:
    """A message as the gate has it when it was answered."""
    parsed = read_message(message, context, "ab" * 32, terms)
    parsed.passage.line, parsed.passage.allowed = describe_message(parsed), allowed
    return parsed
