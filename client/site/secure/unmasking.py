"""The server's half: it opens the sum of the masked vectors, from the answers of enough silos."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from ..parsed import SiteError
from ..trust.chain import digest
from . import masks
from .masks import Vector, decode
from .shamir import combine
from .statements import Statement, threshold


class Opened(NamedTuple):
    """The sum without masks. ``false``: silos whose fault is proven, with what it is."""

    total: Vector
    false: dict[str, str]


def open_sum(
    total: Vector,
    names: Collection[str],
    survivors: Sequence[str],
    context: bytes,
    statements: Mapping[str, Statement],
    answers: Mapping[str, Sequence[bytes]],
    holders: Sequence[str],
    records: Mapping[str, Mapping[str, Any]],
) -> Opened:
    """Return the sum of the survivors' vectors.

    ``total``: the sum of what they sent; ``names``: the round's list; ``holders``: the list in which its shares were
    made; ``answers``: by holder, a share per name; ``records``: with the ``hashes`` of each silo's shares. Raises
    SiteError where fewer true shares than needed have come, or a silo's own secret is false.
    """
    false, secrets = dict[str, str](), dict[str, bytes]()
    for place, name in enumerate(names):
        half, one, shares = int(name not in survivors), statements[name], dict[int, bytes]()
        for x, holder in enumerate(holders):
            given = answers.get(holder, ())
            share = given[place] if len(given) == len(names) else b""
            at = 64 * x + 32 * half
            if share and digest(share) == records[name]["hashes"][at : at + 32].hex():
                shares[x + 1] = share
            elif share:
                false[holder] = (
                    f"its share of {name}'s secret is not the one that {name} signed"
                )
        secrets[name] = _secret(name, shares, len(holders), one.secrets.split(":")[half])
    plus, minus = list[bytes](), list[bytes]()
    for name in names:
        if name in survivors:
            minus.append(masks.self_seed(secrets[name], context))
            continue
        for other in survivors:
            key = decode(statements[other].mask)
            seed = masks.pair_seed(secrets[name], key, context, other)
            (minus if other < name else plus).append(seed)
    return Opened(masks.add(total, plus, minus), false)


def _secret(name: str, shares: Mapping[int, bytes], holders: int, sha256: str) -> bytes:
    """Return a silo's secret. Raises SiteError if it cannot be opened, or is not the one that the silo signed."""
    least = threshold(holders)
    if len(shares) < least:
        raise SiteError(
            f"{len(shares)} shares of {name}'s secret have come, and {least} are needed"
        )
    secret = combine(dict([*shares.items()][:least]))
    if digest(secret) != sha256:
        raise SiteError(
            f"{name}'s shares give another secret than it has signed: {name} is at fault"
        )
    return secret
