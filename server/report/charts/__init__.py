"""Charts of the report: one module per kind, drawn on :mod:`server.report.charts.canvas`."""
