"""What the server and the other hospitals see of a hospital, method by method: docs/privacy.md's table.

Made of what the methods declare (MethodInfo), which tests compare with captured messages.
``make settings`` writes it into the page.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from strategies.base.registry import strategies
from strategies.base.strategy import PersonalizedStrategy

BEGIN, END = "<!-- made by `make settings`: begin -->", "<!-- made by `make settings`: end -->"
COUNTS, MEMBER, RECORDS = "class counts", "membership", "records"
# What can be inferred in principle of a vector that travels, by its name in ``uploads``; a new name is entered here.
VECTORS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "model": ("the whole model", (COUNTS, MEMBER, RECORDS)),
    "change": ("a change of the whole model", (COUNTS, MEMBER, RECORDS)),
    "layers": ("some layers of the model", (COUNTS, MEMBER, RECORDS)),
    "shared": ("the shared layers", (COUNTS, MEMBER, RECORDS)),
    "projection": ("the model, projected to d numbers", (COUNTS, MEMBER, RECORDS)),
    "control": ("a control variate: the mean gradient of a round", (COUNTS, MEMBER, RECORDS)),
    "critical": ("which parameters moved most", (MEMBER,)),
    "prototypes": ("mean features of each class, and the classes' shares", (COUNTS, MEMBER, RECORDS)),
    "statistics": ("mean features of each class times its share", (COUNTS, MEMBER)),
}
# What the numbers are that travel beside them, by their name in ``sends_numbers``.
NUMBERS: Mapping[str, str] = {
    "wanted": "which silos' models it wants",
    "weights": "how much it takes of which silo",
    "steps": "its number of steps",
    "variance": "the variance of its features",
    "sensitivity": "one sensitivity per layer",
}
OWN = {"sent": "**is what is sent**", "layers": "some layers are sent", "kept": "stays"}
PEERS = {
    "mean": "a mean over silos",
    "mixture": "a mixture made for it",
    "models": "**other silos' models, by name**",
    "nothing": "nothing",
}


def row(method: type[PersonalizedStrategy]) -> list[str]:
    """Return a method's line of the table. Raises KeyError for a vector or a number without an entry above."""
    info = method.info
    vectors = [VECTORS[name] for name in info.uploads]
    inferred = dict.fromkeys(word for _, words in vectors for word in words)
    own = "; ".join([OWN[info.own_model], *([info.note] if info.note else [])])
    return [
        f"`{info.name}`",
        "; ".join([*(text for text, _ in vectors), *(NUMBERS[n] for n in info.sends_numbers)]) or "nothing",
        ", ".join(inferred) or "nothing",
        own,
        PEERS[info.receives],
        ", ".join(info.keeps),
    ]


def markdown() -> str:
    header = ["method", "the server sees", "it can infer, in principle", "the silo's own model"]
    header += ["a silo receives", "stays besides"]
    lines = [header, ["---"] * len(header), *(row(method) for method in strategies().values())]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def written(page: str) -> str:
    """The page with the table as it is now."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{markdown()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    file = Path(__file__).parents[2] / "docs" / "privacy.md"
    if sys.argv[1:] == ["--write"]:
        file.write_text(written(file.read_text("utf-8")), "utf-8")
    else:
        print(markdown())
