"""What a silo trains on: its data, and the batches of a round."""
