"""A silo's statement of its keys for one slot, signed by its node key, and the lists of them that a silo accepts.

The server's list is never believed: each name must be a peer of the study that the hospital has approved, and each
statement must be signed by that peer's key.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from pydantic import AfterValidator, Field

from ..chain import digest
from ..envelope import SECURE, unseal
from ..methods import DEFAULTS, METHODS
from ..ours import sum_weights
from ..parsed import Frozen, SiteError, match_pattern, parse_values
from ..run_settings import number
from . import MOST_SILOS
from .shamir import SHARE

STATEMENT = "statement"
LONGEST = 4096  # characters of one
# The rules that the server follows
labels_of, whole = sum_weights.labels_of, sum_weights.whole


# --- what is sent ---------------------------------------------------------------------------------------------------


def agree(private: bytes, public: str) -> bytes:
    """Return the shared secret of two X25519 keys. Raises SiteError for a key that gives none, as of small order."""
    try:
        other = X25519PublicKey.from_public_bytes(bytes.fromhex(public))
        return X25519PrivateKey.from_private_bytes(private).exchange(other)
    except ValueError:
        raise SiteError("must be an X25519 key that gives a secret") from None


def check_key(public: str) -> str:
    agree(bytes(32), public)
    return public


Sha = Annotated[str, match_pattern("[0-9a-f]{64}", "must be 32 bytes in hexadecimal")]
Key = Annotated[Sha, AfterValidator(check_key)]
Number = Annotated[int, Field(ge=1, le=2**31)]
HASHES = 64  # bytes: the SHA-256 of both halves of a share
# The hashes of one silo's share for another, then the share, sealed
SEALED = HASHES + 2 * SHARE + 16
Sealed = Annotated[bytes, Field(min_length=SEALED, max_length=SEALED)]


def slot_of(run: str, round: int, attempt: int | str) -> str:
    """Return the name of one try at one round's sum; ``run``: Flower's number of it."""
    return f"{run}.{round}.{attempt}"


class ServerRecord(Frozen):
    """The server's record. ``statements``: the list; ``sealed``: what each of its silos has sealed for this one."""

    round: Number
    attempt: Number
    statements: Annotated[Sequence[str], Field(max_length=MOST_SILOS)] = ()
    sealed: Sequence[bytes] = ()
    survivors: Sequence[str] = ()
    again: bool = False  # whether its weights are those of an earlier attempt
    sums: Sequence[
        str
    ] = ()  # the run's sums so far: what each one's masks depend on, and its silos

    @property
    def slot(self) -> list[int]:
        return [self.round, self.attempt]


class SiloRecord(Frozen):
    """A silo's record. ``shares``: its answer to `unmask`; ``unreadable``: peers whose shares it cannot open."""

    statement: str = ""
    sealed: Sequence[Sealed] = ()
    shares: Sequence[bytes] = ()
    unreadable: Sequence[str] = ()


class Statement(Frozen):
    """A silo's keys and secrets of a slot, with a correct signature. ``signer``: the fingerprint; ``text``: as it came.

    The first of a slot, which asks for holders, has an empty list of them.
    """

    kind: str
    study: Sha
    slot: str
    silo: str
    samples: Number  # of its training part
    group: str = ""  # the names of the silos that are in a sum with it
    least: Number  # silos in a list that it accepts
    seal: Key  # the public key to seal shares to this silo with
    mask: Key  # the public key of pair masks
    secret: Sha  # of the self mask's secret
    shares: Sha  # of all that it has sealed
    holders: Sha  # of the statements of those who hold the shares
    signer: str
    text: str
    sealed: Sequence[
        bytes
    ] = ()  # its shares, in the order of their holders; only the server has them all

    @property
    def of(self) -> tuple[str, str]:
        """Return the slot and the study."""
        return self.slot, self.study


def digest_of(statements: Mapping[str, Statement]) -> str:
    """Return the SHA-256 of a list of statements."""
    return digest("\n".join(statement.text for statement in statements.values()).encode())


def hashes_of(share: bytes) -> bytes:
    """Return the SHA-256 of both halves of a share."""
    return bytes.fromhex(digest(share[:SHARE]) + digest(share[SHARE:]))


# --- what is accepted -----------------------------------------------------------------------------------------------


def read_statement(statement: str, sealed: Sequence[bytes] = ()) -> Statement:
    """Return the statement in a text. Raises SiteError: "it ..." for one that is damaged or signed wrongly."""
    if len(statement) > LONGEST:
        raise SiteError("it is no statement (too long)")
    fields, signer = unseal(SECURE, STATEMENT, statement)
    fields |= {"signer": signer, "text": statement, "sealed": sealed}
    return parse_values(Statement, fields, "it is no statement", "a silo made it")


def threshold(holders: int) -> int:
    """Return how many holders must answer: more than two thirds."""
    return 2 * holders // 3 + 1


def accept(
    statement: Statement,
    of: tuple[str, str],
    peers: Mapping[str, str],
    listed: dict[str, Statement],
) -> None:
    """Add a statement to a list. Raises SiteError if it cannot follow. ``of``: the list's slot and study."""
    name = statement.silo[:80]
    if statement.silo not in peers:
        raise SiteError(f"{name!r} is no peer of the approved study")
    if statement.signer != peers[statement.silo]:
        raise SiteError(
            f"{name}'s statement is signed by {statement.signer}, not by its own key"
        )
    if statement.of != of:
        raise SiteError(f"{name}'s statement is of another study, run, round or attempt")
    if listed and statement.silo <= max(listed):
        raise SiteError(f"{name} is listed twice, or the list is not in the order of names")
    keys = [key for other in (*listed.values(), statement) for key in (other.seal, other.mask)]
    if len({*keys}) < len(keys):
        raise SiteError(f"{name} has one key twice, or a key that another silo has")
    listed[statement.silo] = statement


def weights_of(
    listed: Mapping[str, Statement], run_config: Mapping[str, Any], labels: Mapping[str, str]
) -> dict[str, int]:
    """Return the weights of a list: equal, or by the samples that the silos have signed, as the method has it.

    A server that chose weights could give a silo the sum to itself. From sums with two sets of weights it could compute
    single updates.
    """
    by = METHODS.get(str(run_config.get("strategy")), {}).get("sums", "")
    by = run_config.get(by, DEFAULTS.get(by, by))
    samples = {name: statement.samples for name, statement in listed.items()}
    cap = number(run_config.get("weight-cap")) or 0
    return sum_weights.weights_in_sum(str(by), samples, cap, labels)
