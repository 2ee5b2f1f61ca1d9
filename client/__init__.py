"""The hospital's side: the ClientApp, a silo's data, device and state, and what may leave it."""
