"""Reader of DICOM waveforms, with pydicom. Source: DICOM PS3.3, C.10.9."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from partitions.common.names import words_in
from partitions.importing.readers.dicom_file import attribute_text, begins_dicom, load
from partitions.importing.readers.reader import ScanError
from partitions.importing.readers.signals import Recording, make_recording, signal_reader
from partitions.splits import Array

# The SOP class of a waveform, in the file's first group or in its first attributes (PS3.4, B.5).
WAVEFORM = re.compile(
    rb"(\x02\x00\x02|\x08\x00\x16)\x00.{4}1\.2\.840\.10008\.5\.1\.4\.1\.1\.9\.", re.DOTALL
)
# Values of these types are numbers; the two others of the standard are telephone codes (mu-law, A-law).
LINEAR = words_in("SB UB SS US SL UL")
SEVERAL = "have several groups of channels: the first is taken"


def begins_waveform(start: bytes) -> bool:
    """Return whether a file that begins so is DICOM, and a waveform by its first attributes."""
    return begins_dicom(start) and WAVEFORM.search(start) is not None


def open_waveform(path: Path) -> Recording:
    """Read the header of a waveform. Raises ScanError, or what pydicom raises."""
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
    channels = []
    for channel in defined:
        unit = _first(channel, "ChannelSensitivityUnitsSequence", "CodeValue")
        unit *= "ChannelSensitivity" in channel
        channels.append((_channel_name(channel), unit, rate, steps))

    def values(places: Sequence[int], seconds: float) -> list[Array]:
        from pydicom.waveforms import multiplex_array

        stored = multiplex_array(dataset, 0, as_raw=True)
        padding = group.get("WaveformPaddingValue") or ()
        if isinstance(padding, bytes):
            padding = np.frombuffer(padding, stored.dtype)[:1]
        physical = np.where(np.isin(stored, padding), np.nan, stored.astype(np.float64))
        return [_physical(physical[:, i], defined[i]) for i in places]

    whose, notes = attribute_text(dataset, "PatientID"), (SEVERAL,) * (len(groups) > 1)
    return make_recording("dicom-waveform", channels, values, patient=whose, notes=notes)


def _first(channel: Any, sequence: str, keyword: str) -> str:
    """Return a value of a sequence's first item as text, "" without one."""
    return "".join(str(item.get(keyword) or "") for item in (channel.get(sequence) or [])[:1])


def _channel_name(channel: Any) -> str:
    """Return a DICOM channel's name: what its source's code means, or its label."""
    if channel.get("ChannelSourceSequence"):
        return _first(channel, "ChannelSourceSequence", "CodeMeaning")
    return str(channel.get("ChannelLabel") or "")


def _physical(stored: Array, channel: Any) -> Array:
    """Return a DICOM channel in its unit (PS3.3, C.10.9.1.4.6)."""
    factor = channel.get("ChannelSensitivityCorrectionFactor")
    scale = float(channel.get("ChannelSensitivity") or 1) * float(
        1 if factor is None else factor
    )
    return np.asarray(stored * scale + float(channel.get("ChannelBaseline") or 0))


READER = signal_reader(open_waveform, begins_waveform)
