"""What silos say of their data, held against each other: no silo's word alone decides what all others compute with.

The setting ``agreed`` is the federation file's word, JSON: ``{"shape": [13], "classes": 2, "samples": {"north": 50}}``,
and maybe ``task``.
Where it says nothing, what most silos say holds. Of a tie, the side holds whose silo's name comes first; of numbers of
classes the largest one, for a silo that lacks the last classes says so in good faith.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from models.shapes import Shape, read_shape, written
from partitions.labels import MOST_CLASSES, ONE_CLASS, TASKS
from strategies.base.metrics_and_cards import MOST, SUMS, WITHHELD, is_shape, is_whole
from strategies.base.settings import UserError

Card = Mapping[str, Any]
FACTS = ("own_file", "task", "shape", "classes")
FAR = 100.0  # times what is usual in a column: the silo's sums are not used
IMPLAUSIBLE = 1e12  # times: the silo is left out. Units differ by 1e9 (cells per litre, 10^9 per litre), by no more


@dataclass(frozen=True)
class Facts:
    """What all silos of a run have in common."""

    own_file: bool  # else their data are simulated
    shape: Shape
    classes: int  # or findings, or measurements: the outputs of the network
    task: str = "multiclass"

    def saved(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self) | {"shape": written(self.shape)}


@dataclass(frozen=True)
class Verdict:
    """Whose cards are used, without sums that are not; and who is left out, with the reason, one line."""

    facts: Facts
    cards: dict[str, dict[str, Any]]
    left_out: dict[str, str]


def read_agreed(text: str) -> dict[str, Any]:
    """The setting ``agreed``. Raises UserError for what it cannot be."""
    try:
        said = json.loads(text or "{}")
    except ValueError:
        said = None
    if not isinstance(said, dict) or not set(said) <= {"task", "shape", "classes", "samples"}:
        raise UserError(f"agreed = {text[:80]!r}: a JSON object of task, shape, classes, samples is wanted here")
    if said.get("task", TASKS[0]) not in TASKS:
        raise UserError(f"agreed: task = {said['task']!r}: one of {', '.join(TASKS)} is wanted here")
    if "shape" in said and not is_shape(said["shape"]):
        raise UserError(
            f"agreed: shape = {said['shape']!r}: a list of one to four whole numbers is wanted here, or of texts as a "
            "silo's data card has them"
        )
    if "classes" in said and not is_whole(said["classes"], 1, MOST_CLASSES):
        raise UserError(f"agreed: classes = {said['classes']!r}: a whole number up to {MOST_CLASSES} is wanted here")
    samples = said.get("samples", {})
    if not isinstance(samples, dict) or not all(is_whole(n, 1, MOST) for n in samples.values()):
        raise UserError(f"agreed: samples = {samples!r}: a whole number from 1 on for each silo is wanted here")
    return said


def sample_weights(counts: Mapping[str, int], cap: float, agreed: Mapping[str, int] | None = None) -> dict[str, int]:
    """What each silo counts in a mean: its samples, as they are agreed, or as it says and at most ``cap`` (0: no cap)
    times the (lower) median of all.
    """
    told = {name: (agreed or {}).get(name, n) for name, n in counts.items()}
    known = [n for n in told.values() if n > 0]
    if not cap or not known:
        return told
    most = max(int(cap * statistics.median_low(known)), 1)
    return {name: n if name in (agreed or {}) else min(n, most) for name, n in told.items()}


def judge(cards: Sequence[Card], said: Mapping[str, Any], by: str, *, sums: bool) -> Verdict:
    """What holds for all silos, and who does not fit. At least one card; their names differ.

    ``said`` holds what is fixed of :class:`Facts`, ``by`` whom: "the federation file has". ``sums``: whether tables'
    sums are asked for; else none are used.
    """
    rest = sorted(cards, key=lambda card: str(card["name"]))
    facts: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for key in FACTS:
        if not rest:
            break
        facts[key] = said.get(key, _most_said([_fact(card, key) for card in rest]))
        source = by if key in said else "most silos have"
        for card in rest:
            if reason := _misfit(key, _fact(card, key), facts, source):
                left_out[card["name"]] = f"{card['name']} is left out: it has {reason}"
        rest = [card for card in rest if card["name"] not in left_out]
    used = {card["name"]: {k: v for k, v in card.items() if sums or k not in (*SUMS, WITHHELD)} for card in rest}
    for name, (ratio, column) in _usual(used).items():
        times = f"values in column {column + 1} that are {ratio:.3g} times those of the others"
        if ratio > IMPLAUSIBLE:
            left_out[name] = f"{name} is left out: its sums say that it has {times}"
            del used[name]
        elif ratio > FAR:
            used[name] = {k: v for k, v in used[name].items() if k not in SUMS}
            used[name][WITHHELD] = f"it has {times}: another unit?"
    return Verdict(Facts(**{"own_file": True, "shape": (), "classes": 1, **facts}), used, left_out)


def _fact(card: Card, key: str) -> Any:
    if key == "task":
        return card.get(key, TASKS[0])  # a silo of an earlier version knows no other
    return read_shape(card["shape"]) if key == "shape" else card[key]


def _most_said(values: Sequence[Any]) -> Any:
    """The most frequent one; of a tie the largest number, or else the first."""
    counts = Counter(values)
    most = [value for value, count in counts.items() if count == max(counts.values())]
    return max(most) if isinstance(most[0], int) and not isinstance(most[0], bool) else most[0]


def misfit(card: Card, facts: Mapping[str, Any], source: str) -> str:
    """The first thing of a silo's that does not fit what holds; empty where all does."""
    return next((r for key in FACTS if (r := _misfit(key, _fact(card, key), facts, source))), "")


def _misfit(key: str, has: Any, facts: Mapping[str, Any], source: str) -> str:
    """What a silo has that does not fit, and how to mend it; empty where it fits."""
    holds = facts[key]
    if key == "task" and has != holds:
        return f"labels for {has}, {source} for {holds} (`task` in the data file, or in the federation file, decides)"
    if key == "own_file" and has != holds:
        kinds = {True: "data of its own", False: "simulated data"}
        return f"{kinds[has]}, {source} {kinds[holds]}"
    if key == "shape" and has != holds:
        return f"samples of shape {has}, {source} {holds} (`shape` in the federation file decides)"
    parts = facts.get("task") in (*ONE_CLASS, "segmentation")  # where fewer are a part of them
    if key == "classes" and (has > holds or (has != holds and not parts)):
        what = "classes" if parts else "labels per sample"
        return f"{has} {what}, {source} {holds} (`classes` in the federation file, or in the data files, decides)"
    return ""


def _usual(cards: Mapping[str, Card]) -> dict[str, tuple[float, int]]:
    """How many times what is usual a silo's values are (root mean square; the median over silos), and in which column.

    A column that is all 0 in a silo says nothing of what is usual: a value may be measured in some hospitals only.
    """
    names = [name for name, card in cards.items() if "sum" in card]
    if not names:
        return {}
    size = torch.tensor([[cards[n]["n_train"]] for n in names], dtype=torch.float64)
    values = (torch.tensor([cards[n]["square_sum"] for n in names], dtype=torch.float64) / size).sqrt()
    usual = torch.where(values > 0, values, torch.nan).nanmedian(0).values
    ratio = torch.where(values > 0, values / usual, 0.0)
    most, column = ratio.max(1)
    return {name: (float(most[i]), int(column[i])) for i, name in enumerate(names)}
