"""The report of a run: its numbers, its words, its charts."""
