"""Studies: what a research committee approved, as a file, and what of a run lies within it."""
