"""The silo's own model, which a run with ``keep-models = reported`` asks for at its end."""
