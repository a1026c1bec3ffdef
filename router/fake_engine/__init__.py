"""Fake inference engine: takes the time of a model on a GPU and computes nothing."""
