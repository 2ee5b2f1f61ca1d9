"""One silo's training on several devices."""
