"""The use of an exported model: ``silofl predict``."""
