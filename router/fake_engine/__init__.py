"""Inference engine that keeps the time of a model on a GPU and computes nothing."""
