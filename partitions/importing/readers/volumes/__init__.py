"""Whole volumes: DICOM series and NIfTI on one grid, their outlines, and outlines written back."""
