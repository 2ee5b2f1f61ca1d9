"""A hospital's answer to a survey of its data."""
