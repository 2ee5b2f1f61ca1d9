"""Trust at the hospital: policy, signatures, pins, audit log."""
