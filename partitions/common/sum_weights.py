"""The silos of a secure sum: their groups, and their weights. Server and silos compute both.

A group is in a sum as a whole or not, and its silos weigh the same. So whatever sums are combined, each group's silos
have one factor, and none of them is left alone. Without ``secure-group`` each silo is a group.

A hospital's own process loads this file, too (`client/protocol/secure/statements.py`): it imports only the standard
library.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from statistics import median_low

FEWEST = 3  # silos of a sum: of two, each knows the other's part; and groups to compare: of two, which one lies?
CAP = 5.0  # of a silo's weight, in median weights, where ``weight-cap`` sets none


def groups_of(names: Iterable[str], size: int) -> list[list[str]]:
    """Return the silos in groups, in the order of names; a remainder joins the last. Empty if they are too few."""
    ordered = sorted(names)
    starts = range(0, len(ordered) - size + 1, size)
    groups = [ordered[at : at + size] for at in starts]
    if groups:
        groups[-1] += ordered[len(groups) * size :]
    return groups


def comparison_fault(silos: int, size: int) -> str:
    """Return why the sums of so many silos in groups of a size cannot be compared; empty: they can."""
    if min(silos // size, size) >= FEWEST:
        return ""
    return (
        f"secure-robust = groups: needs at least {FEWEST} groups of at least {FEWEST} silos that train (secure-group), "
        f"here are {silos // size} of {size}"
    )


def labels_of(groups: Iterable[Iterable[str]]) -> dict[str, str]:
    """Return each silo's group, as a text of its names."""
    return {name: "\n".join(group) for group in groups for name in group}


def whole(names: Collection[str], labels: Mapping[str, str]) -> list[str]:
    """Return those silos, sorted, whose whole group is among the names, and says the same of the group."""
    groups = {name: labels.get(name, "").split("\n") for name in names}
    return [
        name
        for name, group in sorted(groups.items())
        if name in group and all(groups.get(other) == group for other in group)
    ]


def weights_in_sum(
    by: str, samples: Mapping[str, int], cap: float, labels: Mapping[str, str]
) -> dict[str, int]:
    """Return the weights of silos with so many samples: at most ``cap`` medians, and none above half of all.

    ``by``: `samples`; else silos weigh the same, as those of a group always do, by the mean of their samples.
    """
    counts = {name: count if by == "samples" else 1 for name, count in samples.items()}
    groups = defaultdict[str, list[int]](list)
    for name, count in counts.items():
        groups[labels[name]].append(count)
    means = {}
    for name in counts:
        group = groups[labels[name]]
        means[name] = sum(group) // len(group)
    most = max(int((cap or CAP) * median_low(means.values())), 1)
    weights = {name: min(mean, most) for name, mean in means.items()}
    first = max(weights, key=weights.__getitem__)
    weights[first] = max(min(weights[first], sum(weights.values()) - weights[first]), 1)
    return weights
