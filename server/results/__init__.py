"""Results of a run: run directory, history, summary, tracking."""
