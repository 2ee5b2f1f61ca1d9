"""Newcomers: silos held out of the training, or joining late; server half and silo half."""
