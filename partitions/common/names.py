"""Names of silos, and the error for a name that does not exist."""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Iterable, Sequence

from .errors import DataError, UserError

Names = tuple[str, ...]

# Text that a spreadsheet would compute, also if guarded already
FORMULA = re.compile(r"'*[=+\-@\t\r]")
NUMBER = re.compile(r"[+-]?\d+([.,]\d+)?")
# Also a host name, a file name, a TOML key
SILO = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")

LOOK_ALIKE = str.maketrans("авекмнорстухіјѕ‐‑‒–—−", "abekmhopctyxijs------")


def check_silo_name(name: str) -> None:
    """Raise DataError, one line, where a silo of a deployment cannot have this name."""
    if not isinstance(name, str) or not SILO.fullmatch(name):
        raise DataError(
            f"{name!r} is no name: use 1 to 63 lower-case letters, digits and hyphens, a letter first"
        )


def escape(text: str) -> str:
    """Return the text with all characters that are not printable as Python's escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def plain_text(text: str) -> str:
    """Return the form in which two spellings of one word are equal: without case, blanks around and Unicode's variants.

    Characters without a width are removed, dashes become hyphens, and Cyrillic letters those of Latin that look alike.
    """
    if text.isascii():
        return " ".join(text.casefold().split())
    seen = (c for c in unicodedata.normalize("NFKC", text) if unicodedata.category(c) != "Cf")
    return " ".join("".join(seen).casefold().translate(LOOK_ALIKE).split())


def composed(text: str) -> str:
    """Return a text in Unicode's composed form (NFC), in which every reader takes names, labels and cells."""
    return text if text.isascii() else unicodedata.normalize("NFC", text)


def is_formula(text: str) -> bool:
    """Return whether a spreadsheet would compute a text, and it is more than a number."""
    return bool(FORMULA.match(text)) and not NUMBER.fullmatch(text)


def guard_formula(cell: str) -> str:
    """Return text that no spreadsheet computes: formulas get an apostrophe, which :func:`unguard_formula` removes."""
    return f"'{cell}" if FORMULA.match(cell) else cell


def unguard_formula(cell: str) -> str:
    """Return the text of which :func:`guard_formula` made this."""
    return cell[1:] if cell.startswith("'") and FORMULA.match(cell) else cell


def silo_name(index: int) -> str:
    """Return the name of the silo with this index (from 0): ``hospital-01``, ``hospital-02``, ..."""
    return f"hospital-{index + 1:02d}"


def silo_names(hospitals: Sequence[str]) -> list[str]:
    """Return silo names for hospitals' names in files or cells: ``North Clinic`` becomes ``north-clinic``.

    Names become lower case without accents, with hyphens for other characters, and ``hospital-`` before a name that
    does not begin with a letter. Raises DataError where nothing is left, a name is too long, or two are the same.
    """
    names = dict[str, str]()
    for hospital in hospitals:
        plain = (
            unicodedata.normalize("NFKD", hospital).encode("ascii", "ignore").decode().lower()
        )
        name = re.sub("[^a-z0-9]+", "-", plain).strip("-")
        name = name if name[:1].isalpha() else f"hospital-{name}"
        if not SILO.fullmatch(name):
            check_silo_name(hospital)
        if name in names:
            raise DataError(
                f"{hospital!r} and {names[name]!r} would both be the silo {name}; rename one of them"
            )
        names[name] = hospital
    return list(names)


def nearest(word: object, known: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` with the nearest known name in any case, or an empty text."""
    names = {name.casefold(): name for name in known}
    match = difflib.get_close_matches(str(word).casefold(), names, n=1, cutoff=0.5)
    return f" (did you mean '{names[match[0]]}'?)" if match else ""


def words_in(text: str) -> list[str]:
    """Return the words of a text, which lists constants."""
    return text.split()


def split_names(text: object) -> list[str]:
    """Return the names in a text with commas."""
    return [name for name in map(str.strip, str(text).split(",")) if name]


def unknown_name(kind: str, name: object, known: Iterable[str]) -> UserError:
    """Return the error for a name that does not exist, with the nearest name and all existing ones."""
    names = sorted(known)
    return UserError(
        f"unknown {kind} {str(name)[:80]!r}{nearest(name, names)}; there are: {', '.join(short_list(names)) or 'none'}"
    )


def short_list(names: Sequence[str]) -> list[str]:
    """Return names, with those that differ by a number at the end combined: ``pathmnist[-64|-128]``."""
    numbers: dict[str, list[int]] = {name: [] for name in names}
    for name in names:
        base, _, number = name.rpartition("-")
        if number.isdecimal() and base in numbers:
            numbers[base].append(int(number))
            del numbers[name]
    return [
        f"{name}[{'|'.join(f'-{n}' for n in sorted(of))}]" if of else name
        for name, of in numbers.items()
    ]
