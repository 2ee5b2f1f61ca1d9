"""What `silofl export` writes beside a model."""
