"""Client registration: the silos of a run, their data summaries, names and keys, and the silos left out."""
