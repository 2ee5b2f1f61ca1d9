"""What differential privacy needs of a silo beside its training: the key of its noise."""
