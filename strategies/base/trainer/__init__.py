"""The training of a silo: silofl's own loop, or a hospital's trainer."""
