"""What a silo gets that was not there before: held out of the training, or late; in two halves."""
