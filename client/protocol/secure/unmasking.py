"""The server's half: it opens the sum of the masked vectors, from the answers of enough silos."""

from collections.abc import Collection, Mapping, Sequence

from ..chain import digest
from ..parsed import SiteError
from . import masks
from .masks import Vector
from .shamir import combine
from .statements import HASHES, Statement, threshold


def open_sum(
    total: Vector,
    listed: Mapping[str, Statement],
    holders: Sequence[str],
    survivors: Collection[str],
    context: bytes,
    answers: Mapping[str, Sequence[bytes]],
    *,
    alone: bool = False,
) -> tuple[Vector, dict[str, str]]:
    """Return the sum of the survivors' vectors, and the silos whose fault is proven, with what it is.

    ``total``: the sum of what they sent, which is changed; ``listed``: the round's list, with what each silo sealed for
    the holders; ``answers``: by holder, a share per silo of the list; ``alone``: whether the survivors share masks with
    each other alone, so that no other silo's key is needed. Raises SiteError where fewer true shares than
    needed have come, or a silo's own secret is false.
    """
    false, seeds = dict[str, str](), list[tuple[int, bytes]]()
    alive, least = [listed[name] for name in survivors], threshold(len(holders))
    for place, (name, peer) in enumerate(listed.items()):
        survived, shares = name in survivors, dict[int, bytes]()
        if alone and not survived:
            continue
        signed = slice(HASHES // 2) if survived else slice(HASHES // 2, HASHES)
        for x, (holder, sealed) in enumerate(zip(holders, peer.sealed, strict=True), 1):
            answer = answers.get(holder, ())
            share = answer[place] if len(answer) == len(listed) else b""
            if share and digest(share) == sealed[signed].hex():
                shares[x] = share
            elif share:
                false[holder] = (
                    f"its share of {name}'s secret is not the one that {name} signed"
                )
        if len(shares) < least:
            raise SiteError(
                f"{len(shares)} shares of {name}'s secret have come, and {least} are needed"
            )
        secret = combine(dict([*shares.items()][:least]))
        known = digest(secret) if survived else masks.public_of(secret)
        if known != (peer.secret if survived else peer.mask):
            raise SiteError(
                f"{name}'s shares give another secret than it has signed: {name} is at fault"
            )
        # The others' masks with a silo that is gone remain in the sum: its own would cancel them
        if survived:
            seeds.append((-1, masks.self_seed(secret, context)))
        else:
            seeds += masks.pair_seeds(name, secret, alive, context)
    masks.add(total, seeds)
    return total, false
