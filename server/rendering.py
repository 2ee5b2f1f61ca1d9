"""Templates of pages, files and texts for a terminal, which lie in ``templates/``. A missing value is an error.

HTML escapes every value; other texts escape nothing. A Flower app carries no such files. Those that an app fills, of
the report, are in ``templates.json`` too, which ``make settings`` writes.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from jinja2 import (
    ChoiceLoader,
    DictLoader,
    Environment,
    FileSystemLoader,
    StrictUndefined,
    select_autoescape,
)

from partitions.common.names import escape

FOLDER = Path(__file__).with_name("templates")
BUNDLED = Path(__file__).with_name("templates.json")


def environment() -> Environment:
    """Return a new environment of all templates. ``printable``: what would control a terminal is shown as escapes."""
    bundled = DictLoader(json.loads(BUNDLED.read_text("utf-8")))
    templates = Environment(
        loader=ChoiceLoader([FileSystemLoader(FOLDER), bundled]),
        autoescape=select_autoescape(("html",)),
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    templates.filters |= {"json": partial(json.dumps, ensure_ascii=False), "printable": escape}
    return templates


def fill(name: str, /, **values: object) -> str:
    """Return the text of the template ``name``, a path below ``templates/``, with these values."""
    return environment().get_template(name).render(**values)


def bundled_text() -> str:
    """Return the content of ``templates.json``: the report's templates by name."""
    files = sorted(path for path in FOLDER.glob("report/*"))
    texts = {path.relative_to(FOLDER).as_posix(): path.read_text("utf-8") for path in files}
    return json.dumps(texts, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    BUNDLED.write_text(bundled_text(), "utf-8")
