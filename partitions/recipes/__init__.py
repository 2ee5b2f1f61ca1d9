"""Recipes for converting a hospital's table to a data file: drafted, repeated on other rows, sent with a model."""
