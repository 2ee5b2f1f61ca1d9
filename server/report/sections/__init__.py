"""The sections of the report's page: each computes its values and renders one template."""
