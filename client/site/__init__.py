"""The process at the hospital: SuperNode, supervisor, gate, bundle, doctor."""
