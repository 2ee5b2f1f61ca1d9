"""What protects a silo's records: checks, the key of the noise, the private round."""
