"""The use of an exported model: ``silofl predict``, and the new samples that it answers."""
