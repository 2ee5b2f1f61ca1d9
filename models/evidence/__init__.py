"""Evidence on a hospital's model beyond the score: calibration, net benefit, subgroups, conformal sets."""
