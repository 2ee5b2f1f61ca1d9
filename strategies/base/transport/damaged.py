"""A silo's reply when its state is damaged: the text is written and read here.

Only the text of an error reply reaches the server, so both directions are in one file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from flwr.app import Message

from partitions.common.errors import UserError
from strategies.base.transport.reporting import reason_of

NUMBER = r"\d{1,9}"
TEXT = re.compile(
    rf"its state of round ({NUMBER}) is damaged, and it can go back to (no round|rounds? [\d, ]+): "
)
MOST_STATES = 10  # limit of the states named in a reply; a silo keeps fewer


class DamagedStateError(UserError):
    """Error for a damaged state of a silo: the server decides whether the run goes back.

    ``round`` is the round of that state, ``kept`` the rounds of earlier states that can be read (0: the damaged state
    is the silo's first, and there was none before it).
    """

    def __init__(self, round: int, kept: Sequence[int], reason: str) -> None:
        back = (
            f"round{'s' * (len(kept) > 1)} {', '.join(map(str, kept))}" if kept else "no round"
        )
        super().__init__(
            f"its state of round {round} is damaged, and it can go back to {back}: {reason}"
        )


@dataclass(frozen=True)
class Damage:
    """A damaged state of a silo, read from the silo's reply."""

    silo: str
    round: int  # the round that must be repeated to rebuild the state
    kept: tuple[int, ...]
    reason: str

    def is_mended_from(self, done: int) -> bool:
        """Return whether the silo can rebuild the state if the run goes back to the end of round ``done``."""
        goes_back = any(kept <= done for kept in self.kept)
        return done == 0 or (done < self.round and goes_back)


def damages(
    replies: Iterable[Message], names: Mapping[int, str], server_round: int
) -> list[Damage]:
    """Return the damaged states reported in a round's replies, sorted by silo. ``names``: silo names by node."""
    found = []
    for reply in replies:
        silo = names.get(reply.metadata.src_node_id)
        if silo is None or not reply.has_error():
            continue
        reason = reason_of(reply.error.reason)
        if (text := TEXT.match(reason)) is None:
            continue
        kept = tuple(int(number) for number in re.findall(NUMBER, text[2])[:MOST_STATES])
        if 0 < (number := int(text[1])) < server_round:
            found.append(Damage(silo, number, tuple(k for k in kept if k < number), reason))
    return sorted(found, key=lambda damage: damage.silo)
