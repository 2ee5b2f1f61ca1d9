"""The number format in which networks compute."""
