"""The silo's own model, sent at the end of a run with ``keep-models = reported``."""
