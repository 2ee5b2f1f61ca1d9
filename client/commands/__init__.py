"""Groups of the hospital's commands."""
