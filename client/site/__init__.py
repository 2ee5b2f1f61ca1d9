"""The process at the hospital: SuperNode, supervisor, warm executor, bundle, doctor."""
