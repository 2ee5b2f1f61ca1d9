"""Columns of a csv that identify patients, name people or number rows: by their names, and by their cells."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

from partitions.common.errors import DataError, UserError
from partitions.common.names import Names, unknown_name, words_in
from partitions.recipes.cells import LOOKS_LIKE_A_DATE, identifier, is_number
from partitions.recipes.lines import Cells, Lines, cells_in

# 1,23457E+11, as Excel shows numbers of 12 digits
ROUNDED = re.compile(r"\d([.,]\d+)?E\+\d+", re.ASCII)
# Names of a column of patients, in lower case without punctuation: a word, or a person with a kind of identifier.
PERSONS = words_in(
    "patient patients pat subject subj case person participant individual patienten patientin fall proband "
    "probanden versicherten personen dossier"
)
KINDS = words_in(
    "id ids no nr num number key code uid name identifier pseudonym mrn nummer kennung schlüssel"
)
WORDS = {
    *words_in(
        "id mrn pid patid subjid medicalrecordnumber nhsnumber pseudonym participantid patient patients subject "
        "person participant"
    ),
    *(person + kind for person in PERSONS for kind in KINDS),
}

# Names of a column that names people or says where they are, in the same form.
PEOPLE = frozenset(
    words_in(
        "name names fullname surname lastname familyname firstname forename givenname middlename maidenname nickname "
        "initials nachname vorname zuname familienname geburtsname mädchenname nom prenom prénom nomdefamille apellido "
        "apellidos nombre nombres cognome nome achternaam voornaam naam efternamn fornamn address street streetaddress "
        "adresse straße strasse anschrift email emailaddress mail phone phonenumber telephone telefon telefonnummer "
        "mobile fax ssn socialsecuritynumber physician physicianname doctor doctorname surgeon arzt ärztin hausarzt "
        "contact kontakt"
    )
)
# Words of a date of birth, and parts of such words
BORN, BIRTH = (
    ("born", "dob", "bday", "geb"),
    ("birth", "geburt", "naissance", "nacim", "nascita", "geboort"),
)
ROW_NUMBERS = words_in(
    "unnamed index row rownames rowname rownumber lfdnr laufnummer record recordno"
)
ID_WORDS = words_in("id ids uid guid uuid mrn identifier kennung")
ENOUGH_ROWS = 10  # of which each has its own number
PERSON = re.compile(
    r"(mr|mrs|ms|dr|prof|herr|frau|hr|fr|mme|sr|sra)\.? \S.*|\w+, ?(dr\.? |prof\.? )*[^\W\d]+|\S+@\S+\.\w+",
    re.IGNORECASE,
)
ENOUGH_NAMES = 10  # different texts that are called as people are, without a title
MOST_TRIED = 1000  # cells that are compared with it
MOST_PERSONS = 0.5  # above this share of cells like "Meier, Anna", a column is one of names

MOST_REPEATS = 10  # rows of one value, on average, of an identifier; a ward has more


NUMBERED = re.compile(r"([a-z]*)[-_/#. ]*(\d+)", re.ASCII)


def check_identifiers(lines: Lines, column: str) -> None:
    """Raise DataError for identifiers that Excel has rounded, and for two that may be one patient's: 7 and P7.

    ``column``: of the identifiers, or "".
    """
    numbered: dict[str, dict[str, str]] = {}
    for text, where in cells_in(lines, column, [""]).items() if column else ():
        if ROUNDED.fullmatch(text):
            raise DataError(
                f"{where}: {column} is {text!r}, an identifier that Excel has rounded: export it again as text"
            )
        if match := NUMBERED.fullmatch(plain := identifier(text)):
            numbered.setdefault(match[2], {}).setdefault(plain, where)
    for alike in numbered.values():  # by the letters before the number, in whatever way
        prefixes = [plain.rstrip("0123456789").rstrip("-_/#. ") for plain in alike]
        if len(alike) > 1 and ("" in prefixes or len(set(prefixes)) < len(prefixes)):
            first, second = list(alike.values())[:2]
            raise DataError(
                f"{second}: {column} has the number of {first.rpartition(', ')[2]}, with another prefix or mark; is it "
                "one patient? write his identifiers alike, and those of two patients with different numbers"
            )


def names_patients(column: str) -> bool:
    """Return whether a csv column's name is typical of patients' identifiers."""
    return "".join(c for c in column.lower() if c.isalnum()) in WORDS


def words_of(column: str) -> list[str]:
    """Return the words of a column's name, in lower case: ``LastName`` and ``last_name`` have two."""
    return re.findall(r"[^\W\d_]+", re.sub(r"([a-z])([A-Z])", r"\1_\2", column).lower())


def names_people(column: str, cells: Collection[str]) -> bool:
    """Return whether a column has names or addresses of people, by its own name or by most of its ``cells``."""
    words = words_of(column)
    ends = {"".join(words[i:]) for i in range(len(words))} - (
        {"name", "names"} if len(words) > 1 else set()
    )
    most = MOST_PERSONS * max(len(cells), 1)
    persons = sum(bool(PERSON.fullmatch(cell)) for cell in cells)
    names = sum(map(is_capitalised, cells))
    return not ends.isdisjoint(PEOPLE) or persons > most or names > max(most, ENOUGH_NAMES - 1)


def is_capitalised(cell: str) -> bool:
    """Return whether a text is one to three words as in a name: Meier, O'Brien, Anna Meier-Rust, MEIER."""
    words = re.split(r"[ '\u2019-]", cell)
    return len(words) < 4 and all(
        w.isalpha() and (w.istitle() or (w.isupper() and len(w) > 3)) for w in words
    )


def numbers_rows(column: str, cells: Cells) -> bool:
    """Return whether a column of whole numbers is called like an identifier, such as ``visit_occurrence_id``.

    Names such as ``...number`` count only where each row has its own.
    """
    words = words_of(column) or [""]
    called = words[-1] in (*ID_WORDS, *KINDS) or "".join(words) in ROW_NUMBERS
    if not called or len(cells) < ENOUGH_ROWS:
        return False
    numbers = set(map(identifier, cells.different))
    whole = all(number.isdecimal() or not number for number in numbers)
    return whole and numbers != {""} and (words[-1] in ID_WORDS or len(numbers) == len(cells))


def left_out(lines: Lines, columns: Iterable[str]) -> dict[str, str]:
    """Return the reason to leave out a column by itself, for those of people, patients and rows."""
    reasons: dict[str, str] = {}
    for column in columns:
        cells = lines.columns[column]
        if names_patients(column):
            reasons[column] = "it looks like a patient's identifier"
        elif names_people(column, set(cells.head(MOST_TRIED))):
            reasons[column] = "it may name people"
        elif numbers_rows(column, cells):
            reasons[column] = "it looks like an identifier of rows"
    return reasons


def identifiers(lines: Lines, used: Sequence[str]) -> Iterator[str]:
    """Yield the columns that may identify patients: by their name, or called an identifier and with repeated values.

    ``used``: columns with another use.
    """
    for column, cells in lines.columns.items():
        last = (words_of(column) or [""])[-1]
        if column in used or not (names_patients(column) or last in (*KINDS, "mrn")):
            continue
        if names_patients(column) or len(cells) / MOST_REPEATS <= len(cells.different) < len(
            cells
        ):
            yield column


def count_distinct(lines: Lines, columns: Sequence[str]) -> str:
    """Return the number of different values of each column as text."""
    return ", ".join(f"{name} has {len(lines.columns[name].different)}" for name in columns)


def divided_patients(lines: Lines, patient: str, used: Sequence[str]) -> Names:
    """Return a note where each row is of another patient, by the column ``patient`` or without one, but another
    identifier repeats."""
    if patient and len(set(map(identifier, lines.columns[patient].different))) < len(lines):
        return ()
    different = {
        c: len(lines.columns[c].different) for c in identifiers(lines, (*used, patient))
    }
    repeating = [column for column, count in different.items() if count < len(lines)]
    if not repeating:
        return ()
    by = f"by {patient} " if patient else ""
    return (
        f"{by}each of {len(lines)} rows is of another patient, but {count_distinct(lines, repeating)} different "
        "values: one patient may be in training and test; "
        f"--patient {repeating[0]} keeps rows with an equal one together",
    )


def is_row(header: Collection[str]) -> bool:
    """Return whether a csv's first line may be a row: it has numbers or dates."""
    return any(is_number(cell) or LOOKS_LIKE_A_DATE.fullmatch(cell) for cell in header)


def unknown_column(path: Path, name: str, header: Collection[str]) -> DataError | UserError:
    """Return the error for a column that is not there; a first line that may be a patient's row is not shown."""
    if is_row(header):
        return DataError(
            f"{path} has no column {name!r}: its first line has numbers or dates, as a row has, and is not shown; "
            "write a header"
        )
    return unknown_name(f"column of {path}", name, header)


def patient_column(lines: Lines, wanted: str | None, labels: Sequence[str]) -> str:
    """Return the column that identifies patients, or "" for none.

    * ``wanted``: the column that the user names; "": the column ``patient`` if there is one; None: no column.
    * ``labels``: columns with another use.

    Raises DataError where ``wanted`` is "" and the name of another column is typical of patients' identifiers.
    """
    if wanted is None:
        return ""
    if wanted:
        if wanted not in lines.columns:
            raise unknown_column(lines.path, wanted, lines.columns)
        if wanted in labels:
            raise DataError(
                f"{lines.path}: {wanted} is named as the patients' column and as a label or number, too"
            )
        return wanted
    if "patient" in lines.columns:
        return "patient"
    likely = [*identifiers(lines, labels)]
    if any(map(names_patients, likely)):
        column = likely[0] if len(likely) == 1 else "COLUMN"
        raise DataError(
            f"{lines.path}: which column says whose each row is? Of {len(lines)} rows, {count_distinct(lines, likely)} "
            f"different values; name it with --patient {column}, or say --no-patient if each row is of another patient"
        )
    return ""
