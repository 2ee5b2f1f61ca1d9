"""The charts of the report: one module for each kind, drawn on :mod:`server.report.charts.canvas`."""
