"""A csv: its samples, by a recipe or as a list of pictures, and the first draft of its recipe."""
