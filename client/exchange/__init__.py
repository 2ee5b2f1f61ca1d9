"""What every message goes through before and after a handler of the ClientApp."""
