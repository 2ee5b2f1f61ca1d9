"""A run: the round loop, client registration, exchanges with silos, checkpoints, withdrawal."""
