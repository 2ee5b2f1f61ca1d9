"""The code that may run at this site: the apps of `SILOFL_ALLOWED_APPS`, and what a run names as MODULE:FUNCTION.

A list, or a file of it, has SHA-256 sums of apps. A sum is over the app's content (`content_sum`), because two machines
may compress the same app differently. A list may also have the SHA-256 of a file as shipped.

The source of MODULE:FUNCTION is found without running it.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...protocol.code import code_of_data, content_sum, digest_of_code


class AppRefusedError(Exception):
    """The app's SHA-256 is not among those this site allows."""


def check_pin(digest: str, app: bytes = b"") -> None:
    """Raise AppRefusedError unless the app with SHA-256 `digest` is allowed at this site (`SILOFL_ALLOWED_APPS`)."""
    pins = os.environ.get("SILOFL_ALLOWED_APPS", "")
    if not pins:
        return
    content = content_sum(app)
    try:
        allowed = set(read_pins(pins))
    except OSError as error:
        raise log_refusal(
            f"app {content or digest} refused: cannot read the allowed apps: {error}"
        ) from None
    if allowed.isdisjoint((digest, content)):
        where = "SILOFL_ALLOWED_APPS" if is_sums(pins) else pins
        raise log_refusal(
            f"app {content or digest} refused: its SHA-256 is not among the {len(allowed)} listed in {where}"
        )


def log_refusal(line: str) -> AppRefusedError:
    """Log the line and return the error with it."""
    print(f"ERROR: {line}", file=sys.stderr, flush=True)
    return AppRefusedError(line)


def is_sums(pins: str) -> bool:
    """Return whether a value of `SILOFL_ALLOWED_APPS` is a list of sums, and not a file name."""
    return all(
        len(part) == 64 and not set(part) - set("0123456789abcdef")
        for part in split_words(pins)
    )


def split_words(text: str) -> list[str]:
    """Return the words of a text, in lower case, separated by commas or white space."""
    return text.replace(",", " ").lower().split()


def read_pins(pins: str) -> Iterator[str]:
    """Yield the SHA-256 sums of `SILOFL_ALLOWED_APPS`; a file has one per line, `#` starts a comment."""
    if is_sums(pins):
        yield from split_words(pins)
        return
    for line in Path(pins).expanduser().read_text(encoding="utf-8").splitlines():
        # `sha256sum` writes the file's name after the sum
        yield from split_words(line.partition("#")[0])[:1]


# --- the app of a checkout ---


def dataset_faults(study: str, datasets: Mapping[str, str], silo: str, data: Path) -> list[str]:
    """Return why the silo's data are not those of a study, which has each silo's own data set by its source."""
    if not datasets:
        return []
    wanted = datasets.get(silo, "")
    here = code_of_data(data)
    if wanted == here:
        return []
    what = f"an own data set with SHA-256 {here[:16]}..." if here else "a data file"
    of_study = f"{silo} = {wanted[:16]}..." if wanted else f"no {silo}"
    return [f"the study {study} has in [datasets] {of_study}, and the data here are {what}"]


def trainer_faults(study: str, wanted: str, run: Mapping[str, Any]) -> list[str]:
    """Return why the trainer that a run names is not the one of a study, whose source has the SHA-256 ``wanted``."""
    name = str(run.get("trainer", ""))
    if not name:
        return []
    here = digest_of_code(name)
    if here and here == wanted:
        return []
    what = f"has SHA-256 {here[:16]}..." if here else "is missing"
    of_study = f"the study {study} has trainer = {wanted[:16]}..."
    return [f"{of_study}, and {name[:80]} here {what}"]
