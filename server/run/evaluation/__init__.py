"""``silofl evaluate``: the models of files at every silo, in the three ways of running, without training."""
