"""Who may do what at the Control API."""
