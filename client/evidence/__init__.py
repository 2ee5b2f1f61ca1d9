"""The evidence of a hospital's model: measured for a run, and the temperature of an exported model."""
