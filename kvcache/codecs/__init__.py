"""Quantised KV blocks: schemes, encoders and decoders, and values that say what they are."""
