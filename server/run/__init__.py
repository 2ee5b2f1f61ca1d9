"""A run: the round loop, studies, the in-process engine, the run directory, history and summary."""
