"""Signals in files, WFDB, EDF and DICOM waveforms: described from their headers (``probe``), and read as float32.

All signals (steps, channels) of a source have the same channels, in the order of ``--channels`` or else of the first
file, found by name. A signal at another rate than the requested one is resampled by a polyphase filter, which removes
what the new rate cannot carry. A signal that is longer than the requested seconds is cut, and a shorter one is followed
by zeros; notes count both.

Names of channels lose what only one format writes: "Lead I (Einthoven)" and "ECG I" are "I". Volts are converted to mV.

Source: WFDB header(5); EDF and EDF+, https://www.edfplus.info/specs; DICOM PS3.3, C.10.9 (waveforms).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from partitions.common.errors import DataError
from partitions.common.names import Names
from partitions.common.sizes import BLOCK, check_picture
from partitions.importing.dicom_file import is_dicom, load
from partitions.importing.files import (
    ImageInfo,
    ScanError,
    hash_text,
    load_library,
    pseudonym,
    redacted_errors,
)
from partitions.recipes.reading import Acquisition, ReadOptions
from partitions.schema import few
from partitions.splits import Array, Shape

WFDB, EDF = ".hea", ".edf"
ENDINGS = (WFDB, EDF)
EDF_RECORDS = 236  # bytes of a header before its number of data records
# The SOP class of a waveform, in the file's first group or in its first attributes (PS3.4, B.5).
WAVEFORM = re.compile(
    rb"(\x02\x00\x02|\x08\x00\x16)\x00.{4}1\.2\.840\.10008\.5\.1\.4\.1\.1\.9\.", re.DOTALL
)
# Values of these types are numbers; the two others of the standard are telephone codes (mu-law, A-law).
LINEAR = ("SB", "UB", "SS", "US", "SL", "UL")
MILLIVOLTS = {"V": 1000.0, "mV": 1.0, "uV": 1e-3, "\u00b5V": 1e-3, "\u03bcV": 1e-3, "nV": 1e-6}
PREFIX = re.compile(r"^(lead|ecg|ekg)[ _]+", re.IGNORECASE)
LONGEST = 40  # characters of a channel's name or unit
SEVERAL = "have several groups of channels: the first is taken"


@dataclass(frozen=True)
class Recording:
    """A recording from its header: a name, unit, rate in Hz and number of steps for each channel.

    * ``values``: reads channels by their places, each float64 (steps,), at most so many steps of the slowest.
    * ``patient``: its identifier in the header, "" without one; ``scales``: what a value is multiplied by.
    """

    format: str
    names: Names
    units: Names
    scales: tuple[float, ...]
    rates: tuple[float, ...]
    steps: Shape
    values: Callable[[Sequence[int], float], list[Array]]
    patient: str = ""
    notes: Names = ()


def is_waveform(path: Path) -> bool:
    """Return whether a DICOM file is a waveform, by its first attributes."""
    with path.open("rb") as file:
        return WAVEFORM.search(file.read(1024)) is not None


def is_signal(path: Path) -> bool:
    """Return whether a file is a recording, by its name or as a DICOM waveform."""
    return path.name.lower().endswith(ENDINGS) or (is_dicom(path) and is_waveform(path))


def with_ending(path: Path) -> Path:
    """Return the header of a WFDB record that is named without its ending, as its tables name records."""
    header = path.with_name(f"{path.name}{WFDB}")
    return header if not path.exists() and header.is_file() else path


def files_of(path: Path) -> tuple[Path, ...]:
    """Return the files of a sample: of a WFDB record also those that its header names."""
    if not path.name.lower().endswith(WFDB) or not path.is_file():
        return (path,)
    with path.open(encoding="latin-1") as file:
        lines = [line.split() for line in file.read(BLOCK).splitlines() if line[:1] != "#"]
    named = dict.fromkeys(words[0] for words in [words for words in lines if words][1:])
    return path, *(path.parent / name for name in named)


def open_recording(path: Path) -> Recording:
    """Read the header of a recording. Raises ScanError, or what its library raises."""
    name = path.name.lower()
    return (_wfdb if name.endswith(WFDB) else _dicom if is_dicom(path) else _edf)(path)


def _make_recording(
    kind: str, channels: Sequence[tuple[str, str, float, int]], values: Any, **more: Any
) -> Recording:
    """Return the recording of channels, each a name, unit, rate and number of steps. Raises ScanError."""
    if not channels:
        raise ScanError("its file has no channels")
    names, units, rates, steps = zip(*channels, strict=True)
    if not all(0 < rate < np.inf for rate in rates) or min(steps) < 1:
        raise ScanError("its header has a channel without a rate, or without values")
    for text in (*names, *units):
        if len(text) > LONGEST or not text.isprintable():
            raise ScanError(f"a channel has a name or unit of more than {LONGEST} characters")
    check_picture((sum(steps),), "its signal")
    scales = tuple(MILLIVOLTS.get(unit, 1.0) for unit in units)
    units = tuple("mV" if unit in MILLIVOLTS else unit for unit in units)
    short = tuple(PREFIX.sub("", re.split(r"[,(]", name)[0].strip()) for name in names)
    return Recording(kind, short, units, scales, rates, steps, values, **more)


def _wfdb(path: Path) -> Recording:
    wfdb = load_library("WFDB", "wfdb")
    if path.stat().st_size > BLOCK:
        raise ScanError("its header is larger than 1 MiB")
    record = str(path.with_suffix(""))
    header = wfdb.rdheader(record)
    if not isinstance(header, wfdb.Record):
        raise ScanError("its record is of several segments: save it as one")
    if any(not named_file.is_file() for named_file in files_of(path)):
        raise ScanError("its header names a file that is not there")
    per_frame = header.samps_per_frame or []
    count = header.n_sig or 0
    names = [name or "" for name in header.sig_name or [""] * count]
    channels = [
        (name, unit or "", float(header.fs) * frame, int(header.sig_len or 0) * frame)
        for name, unit, frame in zip(names, header.units or [], per_frame, strict=True)
    ]

    def values(places: Sequence[int], seconds: float) -> list[Array]:
        to = min(int(header.sig_len), int(np.ceil(seconds * header.fs))) if seconds else None
        physical = wfdb.rdrecord(record, channels=list(places), sampto=to, smooth_frames=False)
        return [np.asarray(named_file, np.float64) for named_file in physical.e_p_signal]

    return _make_recording("wfdb", channels, values)


def _edf(path: Path) -> Recording:
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
        return [np.asarray(edf.signals[i].get_data_slice(0, end), np.float64) for i in places]

    # Code, sex, birth date and name, as EDF+ has them; plain EDF may have any text there.
    words = edf.local_patient_identification.split()
    coded = len(words) > 3 and words[1] in ("F", "M", "X") and words[0] != "X"
    return _make_recording("edf", channels, values, patient=words[0] if coded else "")


def _dicom(path: Path) -> Recording:
    dataset = load(path, ("PatientID", "WaveformSequence"))
    groups = dataset.get("WaveformSequence") or []
    if not groups:
        raise ScanError("its file holds no waveform")
    group = groups[0]
    if group.WaveformSampleInterpretation not in LINEAR:
        raise ScanError("its values are telephone codes, no numbers; export them as numbers")
    rate = float(group.SamplingFrequency)
    steps = int(group.NumberOfWaveformSamples)
    defined = list(group.ChannelDefinitionSequence)
    if len(defined) != group.NumberOfWaveformChannels:
        raise ScanError("its header defines another number of channels than it has")
    channels = [(_channel_name(channel), _unit(channel), rate, steps) for channel in defined]

    def values(places: Sequence[int], seconds: float) -> list[Array]:
        from pydicom.waveforms import multiplex_array

        stored = multiplex_array(dataset, 0, as_raw=True)
        if padding := group.get("WaveformPaddingValue"):
            pad = (
                np.frombuffer(padding, stored.dtype)[0]
                if isinstance(padding, bytes)
                else padding
            )
        missing = stored == pad if padding else np.zeros(stored.shape, bool)
        physical = np.where(missing, np.nan, stored.astype(np.float64))
        return [_physical(physical[:, i], defined[i]) for i in places]

    patient = str(dataset.get("PatientID") or "").strip()
    return _make_recording(
        "dicom-waveform",
        channels,
        values,
        patient=patient,
        notes=(SEVERAL,) * (len(groups) > 1),
    )


def _channel_name(channel: Any) -> str:
    """Return a DICOM channel's name: its label, or what its source's code means."""
    source = channel.get("ChannelSourceSequence") or []
    return (
        str(source[0].get("CodeMeaning") or "")
        if source
        else str(channel.get("ChannelLabel") or "")
    )


def _unit(channel: Any) -> str:
    units = channel.get("ChannelSensitivityUnitsSequence") or []
    return (
        str(units[0].get("CodeValue") or "")
        if units and "ChannelSensitivity" in channel
        else ""
    )


def _physical(stored: Array, channel: Any) -> Array:
    """Return a DICOM channel in its unit (PS3.3, C.10.9.1.4.6)."""
    factor = channel.get("ChannelSensitivityCorrectionFactor")
    offset = channel.get("ChannelBaseline")
    scale = float(channel.get("ChannelSensitivity") or 1) * float(
        1 if factor is None else factor
    )
    return np.asarray(stored * scale + float(offset or 0))


# The requested channels

KIND = "a signal"
MOST_RATIO = 1000  # of two rates, as a fraction


@dataclass(frozen=True)
class ChosenChannels:
    """The channels of a recording to be read: their places, the rate, the steps to be made and those that are there."""

    places: Shape
    rate: float
    steps: int
    there: int


def choose(recording: Recording, reading: ReadOptions) -> ChosenChannels:
    """Return the requested channels of a recording, or all. Raises ScanError where one is missing or there twice."""
    known = [name.casefold() for name in recording.names]
    wanted = [name.casefold() for name in reading.channels] or known
    if missing := [name for name in reading.channels if name.casefold() not in known]:
        raise ScanError(f"it has no channel {few(missing)}; it has {few(recording.names, 30)}")
    if twice := sorted({name for name in wanted if known.count(name) > 1}):
        raise ScanError(f"it has channel {few(twice)} twice; name others with --channels")
    places = tuple(known.index(name) for name in wanted)
    rates = {recording.rates[i] for i in places}
    if len(rates) > 1 and not reading.rate:
        each = few([f"{rate:g}" for rate in sorted(rates)], 8)
        raise ScanError(f"its channels have rates of {each} Hz; use --rate, or --channels")
    rate = reading.rate or rates.pop()
    there = min(round(recording.steps[i] * rate / recording.rates[i]) for i in places)
    return ChosenChannels(
        places, rate, round(reading.seconds * rate) if reading.seconds else there, there
    )


def probe(path: Path, where: str, reading: ReadOptions) -> ImageInfo:
    """Return the info of a signal from its header: ``height`` steps of ``channels`` channels."""
    check_options(where, reading)
    with redacted_errors(where, KIND):
        recording = open_recording(path)
        chosen = choose(recording, reading)
        check_picture((chosen.steps, len(chosen.places)), "its signal")
        names, units, rates = (
            tuple(values[i] for i in chosen.places)
            for values in (recording.names, recording.units, recording.rates)
        )
        notes = list(recording.notes)
        if chosen.there != chosen.steps:
            longer = chosen.there > chosen.steps
            notes.append(
                f"are {'longer' if longer else 'shorter'} than {reading.seconds:g} s: "
                + ("the beginning is taken" if longer else "zeros follow")
            )
        if set(rates) != {chosen.rate}:
            notes.append(f"have other rates: resampled to {chosen.rate:g} Hz")
        taken = Acquisition(recording.format, rate=min(rates), channels=names, units=units)  # type: ignore[arg-type]
        whose = recording.patient
        return ImageInfo(
            *(chosen.steps, 1, len(names), True, pseudonym(whose), tuple(notes), taken),
            spelling=hash_text(whose),
            rate=chosen.rate,
        )


def check_options(where: str, reading: ReadOptions) -> None:
    """Raise DataError for options of pictures and scans."""
    of_pictures = {
        "--size": reading.size,
        "--window": reading.window,
        "--spacing": reading.spacing or reading.voxel,
        "--slices": reading.slices > 1,
        "--volume": reading.volume,
    }
    if option := next((name for name, value in of_pictures.items() if value), ""):
        raise DataError(f"{where}: its file is a signal, and {option} is of pictures and scans")


def read(path: Path, where: str, reading: ReadOptions) -> Array:
    """Read a signal, float32 (steps, channels). Raises DataError where a value is missing."""
    with redacted_errors(where, KIND):
        recording = open_recording(path)
        chosen = choose(recording, reading)
        signal = np.zeros((chosen.steps, len(chosen.places)), np.float32)
        channels = recording.values(chosen.places, reading.seconds or 0.0)
        for column, (place, values) in enumerate(zip(chosen.places, channels, strict=True)):
            if missing := int((~np.isfinite(values)).sum()):
                name = recording.names[place]
                raise ScanError(f"its channel {name} has {missing} steps without a value")
            scaled = resample_channel(
                values * recording.scales[place], recording.rates[place], chosen.rate
            )
            kept = scaled[: chosen.steps]
            signal[: len(kept), column] = kept
        return signal


def resample_channel(values: Array, present: float, rate: float) -> Array:
    """Return a channel of ``own`` Hz at another rate; beyond its ends it follows the line through both."""
    if present == rate:
        return values
    from scipy.signal import resample_poly

    ratio = Fraction(rate / present).limit_denominator(MOST_RATIO)
    if not ratio or abs(float(ratio) * present / rate - 1) > 1e-6:
        raise ScanError(f"its rate of {present:g} Hz has no simple ratio to {rate:g} Hz")
    return np.asarray(resample_poly(values, ratio.numerator, ratio.denominator, padtype="line"))


def check_alike(places: Sequence[str], infos: Sequence[ImageInfo]) -> None:
    """Raise DataError for the first signal with other channels, units, rate or length than the first."""
    first = infos[0]
    names = sorted(map(str.casefold, first.acquired.channels))
    units = dict(
        zip(map(str.casefold, first.acquired.channels), first.acquired.units, strict=True)
    )
    for where, info in zip(places, infos, strict=True):
        taken = info.acquired
        unit_of = dict(zip(map(str.casefold, taken.channels), taken.units, strict=True))
        if sorted(unit_of) != names:
            raise DataError(
                f"{where}: its file has channels {few(taken.channels, 30)}, the first one has "
                f"{few(first.acquired.channels, 30)}; use --channels"
            )
        if other := [name for name in names if unit_of[name] != units[name]]:
            raise DataError(
                f"{where}: its channel {other[0]} is in {unit_of[other[0]] or 'no unit'}, the first file's in "
                f"{units[other[0]] or 'no unit'}; convert one of them"
            )
        if info.rate != first.rate:
            raise DataError(
                f"{where}: its file has {info.rate:g} Hz, the first one {first.rate:g}; use --rate"
            )
        if info.height != first.height:
            raise DataError(
                f"{where}: its file has {info.height} steps ({info.height / info.rate:g} s), the first one "
                f"{first.height}; use --seconds"
            )
