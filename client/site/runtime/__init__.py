"""The processes at the hospital: SuperNode, supervisor, worker processes."""
