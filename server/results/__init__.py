"""What a run leaves behind: run directory, history, summary, tracking."""
