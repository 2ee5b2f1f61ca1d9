"""Training in a silo: its data, and the batches of a round."""
