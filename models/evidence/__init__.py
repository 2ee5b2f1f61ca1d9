"""What a hospital learns of its model beyond the score: calibration, net benefit, subgroups, conformal sets."""
