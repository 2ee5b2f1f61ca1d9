"""The report of a run: its values, sections, templates and charts."""
