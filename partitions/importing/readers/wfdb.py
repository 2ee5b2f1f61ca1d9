"""Reader of WFDB records, with wfdb. Source: WFDB header(5)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from partitions.common.sizes import BLOCK
from partitions.importing.readers.reader import ScanError, load_library
from partitions.importing.readers.signals import Recording, make_recording, signal_reader
from partitions.splits import Array

HEADER = ".hea"


def with_ending(path: Path) -> Path:
    """Return a path as a table names it: of a WFDB record without its ending its header, and one with backslashes."""
    if not path.exists():
        path = Path(str(path).replace("\\", "/"))
    header = path.with_name(f"{path.name}{HEADER}")
    return header if not path.exists() and header.is_file() else path


def record_files(path: Path) -> tuple[Path, ...]:
    """Return the files of a sample: of a WFDB record also those that its header names."""
    if not path.name.lower().endswith(HEADER) or not path.is_file():
        return (path,)
    with path.open(encoding="latin-1") as file:
        lines = [line.split() for line in file.read(BLOCK).splitlines() if line[:1] != "#"]
    named = dict.fromkeys(words[0] for words in [words for words in lines if words][1:])
    return path, *(path.parent / name for name in named)


def open_record(path: Path) -> Recording:
    """Read the header of a record. Raises ScanError, or what wfdb raises."""
    wfdb = load_library("WFDB", "wfdb")
    if path.stat().st_size > BLOCK:
        raise ScanError("its header is larger than 1 MiB")
    record = str(path.with_suffix(""))
    header = wfdb.rdheader(record)
    if not isinstance(header, wfdb.Record):
        raise ScanError("its record is of several segments: save it as one")
    if any(not named_file.is_file() for named_file in record_files(path)):
        raise ScanError("its header names a file that is not there")
    per_frame, count = header.samps_per_frame or [], header.n_sig or 0
    names = header.sig_name or [""] * count
    channels = [
        (name or "", unit or "", float(header.fs) * frame, int(header.sig_len or 0) * frame)
        for name, unit, frame in zip(names, header.units or [], per_frame, strict=True)
    ]

    def values(places: Sequence[int], seconds: float) -> list[Array]:
        to = min(int(header.sig_len), int(np.ceil(seconds * header.fs))) if seconds else None
        physical = wfdb.rdrecord(record, channels=list(places), sampto=to, smooth_frames=False)
        return [np.asarray(signal, np.float64) for signal in physical.e_p_signal]

    return make_recording("wfdb", channels, values)


# Its header is a text, which only its ending tells
READER = signal_reader(open_record, lambda start: False, (HEADER,))
