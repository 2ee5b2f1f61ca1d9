"""Values by silo and seed: means over the pairs that methods share, so that none is better for want of a weak silo."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping

Pair = tuple[str, int]  # silo, seed
ByPair = Mapping[Pair, float]


def means_by_silo(values: ByPair, pairs: Collection[Pair]) -> dict[str, float]:
    """Return each silo's mean over its seeds among ``pairs``."""
    seeds = dict[str, list[float]]()
    for silo, seed in sorted(pairs):
        seeds.setdefault(silo, []).append(values[silo, seed])
    return {silo: statistics.fmean(of_seeds) for silo, of_seeds in seeds.items()}


def shared_means(each: Mapping[str, ByPair]) -> dict[str, float]:
    """Return by method with a value the mean over silos, of pairs that all of these methods have.

    Where they share none, the method with the fewest pairs is left out, until the others share some.
    """
    known = [method for method in each if each[method]]
    known.sort(key=lambda method: -len(each[method]))
    while known:
        shared = set.intersection(*(set(each[method]) for method in known))
        if shared:
            return {
                method: statistics.fmean(means_by_silo(each[method], shared).values())
                for method in known
            }
        known.pop()
    return {}


def part_text(pairs: Collection[Pair], every: Collection[Pair]) -> str:
    """Return of how many of the silos and seeds of ``every`` these are: ``2 of 3 hospitals``.

    Empty for all of them, and for none.
    """
    if not pairs or len(pairs) == len(every):
        return ""
    silos, seeds = map(set, zip(*pairs, strict=True))
    all_silos, all_seeds = map(set, zip(*every, strict=True))
    texts = list[str]()
    if silos != all_silos:
        texts.append(f"{len(silos)} of {len(all_silos)} hospitals")
    if seeds != all_seeds:
        texts.append(f"{len(seeds)} of {len(all_seeds)} seeds")
    # All hospitals and all seeds, but not each hospital with each seed
    return ", ".join(texts) or f"{len(pairs)} of {len(every)} results"
