"""A silo's statement of its keys for one slot, signed by its node key, and the lists of them that a silo accepts.

The server's list is never believed: each name must be a peer of the study that the hospital has approved, and each
statement must be signed by that peer's key.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from ..parsed import Frozen, SiteError, match_pattern, parse_values
from ..private import load_ours
from ..trust.chain import digest
from ..trust.envelope import SECURE, PrivateKey, seal, unseal
from ..trust.message_rules import number
from ..trust.methods import DEFAULTS, METHODS
from . import MOST_SILOS

LONGEST = 4096  # characters of a statement
# The rules that the server follows
_sums: Any = load_ours("partitions/common", "sum_weights")
labels_of, whole = _sums.labels_of, _sums.whole


# 32 bytes in base64, each in one way
Key = Annotated[
    str, match_pattern("([A-Za-z0-9+/]{42}[AEIMQUYcgkosw048]=)?", "must be 32 bytes in base64")
]
Sha = Annotated[str, match_pattern("([0-9a-f]{64})?", "must be a SHA-256")]
Shas = Annotated[str, match_pattern("([0-9a-f]{64}:[0-9a-f]{64})?", "must be two SHA-256 sums")]
Number = Annotated[int, Field(ge=1, le=2**31)]


class Slot(NamedTuple):
    """One try at one round's sum: Flower's number of the run, the round, the attempt."""

    run: str
    round: int
    attempt: int

    def __str__(self) -> str:
        return ".".join(map(str, self))


class Statement(Frozen):
    """A statement with a correct signature. ``signer``: the key's fingerprint; ``text``: as it came."""

    kind: str
    study: Sha
    run: str
    round: Number
    attempt: Number
    phase: Literal["keys", "round"]
    silo: str
    samples: Number  # of its training part
    group: str = ""  # the names of the silos that are in a sum with it
    seal: Key  # the public key to seal shares to this silo with
    # The public key of pair masks; this and what follows are empty in phase "keys"
    mask: Key = ""
    secrets: Shas = ""  # of the self mask's secret and of the mask key
    shares: Sha = ""  # of the hashes of all shares
    holders: Sha = ""  # of the statements of those who hold them
    signer: str
    text: str

    @property
    def slot(self) -> Slot:
        return Slot(self.run, self.round, self.attempt)


def state(slot: Slot, key: PrivateKey, **fields: Any) -> str:
    """Return a silo's signed statement."""
    return seal(SECURE, "statement", {**slot._asdict(), **fields}, key)


def digest_of(statements: Mapping[str, Statement]) -> str:
    """Return the SHA-256 of a list of statements."""
    return digest("\n".join(one.text for one in statements.values()).encode())


def read_statement(text: str) -> Statement:
    """Return the statement in a text. Raises SiteError: "it ..." for one that is damaged or signed wrongly."""
    if len(text) > LONGEST:
        raise SiteError("it is no statement (too long)")
    fields, signer = unseal(SECURE, "statement", text)
    fields |= {"signer": signer, "text": text}
    return parse_values(Statement, fields, "it is no statement", "a silo made it")


def threshold(holders: int) -> int:
    """Return how many holders must answer: more than two thirds."""
    return 2 * holders // 3 + 1


def check_statement(
    one: Statement,
    of: tuple[Slot, str, str],
    peers: Mapping[str, str],
    before: Mapping[str, Statement],
) -> None:
    """Raise SiteError if a statement cannot follow those ``before`` in a list. ``of``: its slot, phase and study."""
    name = one.silo[:80]
    if one.silo not in peers:
        raise SiteError(f"{name!r} is no peer of the approved study")
    if one.signer != peers[one.silo]:
        raise SiteError(f"{name}'s statement is signed by {one.signer}, not by its own key")
    if (one.slot, one.phase, one.study) != of:
        raise SiteError(f"{name}'s statement is of another study, run, round or attempt")
    if before and one.silo <= max(before):
        raise SiteError(f"{name} is listed twice, or the list is not in the order of names")
    own = [one.seal] if one.phase == "keys" else [one.seal, one.mask]
    sums = () if one.phase == "keys" else (one.secrets, one.shares, one.holders)
    known = {key for other in before.values() for key in (other.seal, other.mask)}
    if not all((*own, *sums)) or one.seal == one.mask or known.intersection(own):
        raise SiteError(f"{name} lacks a key or a sum, or has a key that another silo has")


def read_list(
    texts: Any, of: tuple[Slot, str, str], peers: Mapping[str, str]
) -> dict[str, Statement]:
    """Return the statements of a list by silo. Raises SiteError for a list that a silo must not accept."""
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise SiteError("the message has no list of peers' statements")
    if len(texts) > MOST_SILOS:
        raise SiteError(f"the list has {len(texts)} silos, and {MOST_SILOS} is the most")
    found = dict[str, Statement]()
    for place, text in enumerate(texts, 1):
        try:
            one = read_statement(text)
        except SiteError as error:
            raise SiteError(f"statement {place} of the list: {error}") from None
        check_statement(one, of, peers, found)
        found[one.silo] = one
    return found


def weights_of(
    listed: Mapping[str, Statement], run_config: Mapping[str, Any], labels: Mapping[str, str]
) -> dict[str, int]:
    """Return the weights of a list: equal, or by the samples that the silos have signed, as the method has it.

    A server that chose weights could give a silo the sum to itself. From sums with two sets of weights it could compute
    single updates.
    """
    by = METHODS.get(str(run_config.get("strategy")), {}).get("sums", "")
    by = run_config.get(by, DEFAULTS.get(by, by))
    counts = {name: one.samples if by == "samples" else 1 for name, one in listed.items()}
    found: dict[str, int] = _sums.weights_in_sum(
        counts, number(run_config.get("weight-cap")) or 0, labels
    )
    return found
