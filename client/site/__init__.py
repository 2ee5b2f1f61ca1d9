"""The process at the hospital: SuperNode, supervisor, prefork, bundle, doctor."""
