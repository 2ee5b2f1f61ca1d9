"""How a hospital's table becomes a data file, written down: proposed, repeated on other rows, sent with a model."""
