"""Steps before and after every handler of the ClientApp."""
