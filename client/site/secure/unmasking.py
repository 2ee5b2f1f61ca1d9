"""The server's half: it opens the sum of the masked vectors, from the answers of enough silos."""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from ..parsed import SiteError
from ..trust.chain import digest
from . import masks
from .masks import Vector
from .shamir import combine
from .statements import HASHES, Keys, Slot, Statement, threshold


class Offers(NamedTuple):
    """What silos have made for one slot: statements, and what each has sealed for the holders, in their order."""

    slot: Slot
    holders: Mapping[str, Keys]
    statements: Mapping[str, Statement]
    sealed: Mapping[str, Sequence[bytes]]


class Opened(NamedTuple):
    """The sum without masks. ``false``: silos whose fault is proven, with what it is."""

    total: Vector
    false: dict[str, str]


def open_sum(
    total: Vector,
    made: Offers,
    names: Collection[str],
    survivors: Collection[str],
    context: bytes,
    answers: Mapping[str, Sequence[bytes]],
) -> Opened:
    """Return the sum of the survivors' vectors.

    ``total``: the sum of what they sent; ``names``: the round's list; ``answers``: by holder, a share per name. Raises
    SiteError where fewer true shares than needed have come, or a silo's own secret is false.
    """
    false, plus, minus = dict[str, str](), list[bytes](), list[bytes]()
    alive = [made.statements[name] for name in survivors]
    for place, name in enumerate(names):
        half, shares = int(name not in survivors), dict[int, bytes]()
        for x, (holder, signed) in enumerate(
            zip(made.holders, made.sealed[name], strict=True), 1
        ):
            given = answers.get(holder, ())
            share = given[place] if len(given) == len(names) else b""
            at = HASHES // 2 * half
            if share and digest(share) == signed[at : at + HASHES // 2].hex():
                shares[x] = share
            elif share:
                false[holder] = (
                    f"its share of {name}'s secret is not the one that {name} signed"
                )
        secret = _secret(made.statements[name], half, shares, threshold(len(made.holders)))
        if half:
            add, subtract = masks.pair_seeds(name, secret, alive, context)
            plus += add
            minus += subtract
        else:
            minus.append(masks.self_seed(secret, context))
    return Opened(masks.add(total, plus, minus), false)


def _secret(one: Statement, half: int, shares: Mapping[int, bytes], least: int) -> bytes:
    """Return a silo's secret. Raises SiteError if it cannot be opened, or is not the one that the silo signed."""
    name = one.silo
    if len(shares) < least:
        raise SiteError(
            f"{len(shares)} shares of {name}'s secret have come, and {least} are needed"
        )
    secret = combine(dict([*shares.items()][:least]))
    if (masks.public_of(secret) != one.mask) if half else (digest(secret) != one.secret):
        raise SiteError(
            f"{name}'s shares give another secret than it has signed: {name} is at fault"
        )
    return secret
