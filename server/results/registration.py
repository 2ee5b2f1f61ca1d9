"""The study that a run belongs to, as it was before the first round: ``study.toml`` in the run directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from client.protocol.envelope import signer_of
from client.protocol.study import StudyProtocol, parse_study
from partitions.common.errors import UserError
from partitions.common.files import write_atomically
from partitions.common.parsed import read_text
from server.results.history import history_file

STUDY = "study.toml"


@dataclass(frozen=True)
class KeptStudy:
    """A run's study, and the fingerprint of its signer; empty if unsigned."""

    study: StudyProtocol
    signer: str


def keep_study(folder: Path, text: str) -> None:
    """Write a study's text, unless it is empty, into a run directory.

    Raises UserError if the run began without it, or with another.
    """
    file = folder / STUDY
    if not text or (file.exists() and read_text(file) == text):
        return
    if file.exists() or history_file(folder / "history.csv").exists():
        raise UserError(
            f"--study: {folder} began {'with another' if file.exists() else 'without a'} study, and what is tested is "
            "fixed before a run: resume it as it began, or give --out a new directory"
        )
    write_atomically(file, text)


def registration_of(folder: Path) -> KeptStudy | None:
    """Return the study in a run directory; None without one. Raises SiteError if it was changed or is invalid."""
    file = folder / STUDY
    if not file.exists():
        return None
    text = read_text(file)
    return KeptStudy(parse_study(text, str(file)), signer_of(text))
