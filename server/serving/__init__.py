"""A model behind HTTP: ``silofl predict --serve``."""
