"""Signals: WFDB, EDF and DICOM waveforms as channels of one unit and one rate."""
