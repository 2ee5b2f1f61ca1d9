"""Reader of EDF and EDF+ files, with edfio. Source: https://www.edfplus.info/specs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from partitions.importing.readers.reader import ScanError, load_library
from partitions.importing.readers.signals import Recording, make_recording, signal_reader
from partitions.splits import Array

VERSION = b"0       "
HEADER_BYTES = slice(184, 192)  # of the header: their number as a text
EDF_RECORDS = 236  # bytes of a header before its number of data records


def begins_edf(start: bytes) -> bool:
    """Return whether a file that begins so is EDF."""
    return start.startswith(VERSION) and start[HEADER_BYTES].strip().isdigit()


def open_edf(path: Path) -> Recording:
    """Read the header of a recording. Raises ScanError, or what edfio raises."""
    # Latin-1, because many programs write the unit as a micro sign, which is no ASCII.
    edf = load_library("EDF", "edfio").read_edf(
        path, lazy_load_data=True, header_encoding="latin-1"
    )
    if not edf.is_continuous:
        raise ScanError("its recording has interruptions (EDF+D): save its parts one by one")
    with path.open("rb") as file:
        file.seek(EDF_RECORDS)
        stated, there = int(file.read(8)), edf.num_data_records
    if stated not in (-1, there):
        raise ScanError(f"its header counts {stated} data records, and its file has {there}")
    channels = [
        (
            signal.label.strip(),
            signal.physical_dimension.strip(),
            float(signal.sampling_frequency),
            signal.samples_per_data_record * there,
        )
        for signal in edf.signals
    ]

    def values(places: Sequence[int], seconds: float) -> list[Array]:
        end = min(seconds or edf.duration, edf.duration)
        signals = (edf.signals[i] for i in places)
        return [np.asarray(signal.get_data_slice(0, end), np.float64) for signal in signals]

    # Code, sex, birth date and name, as EDF+ has them; plain EDF may have any text there.
    words = edf.local_patient_identification.split()
    coded = len(words) > 3 and words[1] in ("F", "M", "X") and words[0] != "X"
    return make_recording("edf", channels, values, patient=words[0] if coded else "")


READER = signal_reader(open_edf, begins_edf, (".edf",))
