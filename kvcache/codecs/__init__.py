"""Quantised KV blocks: schemes, encoders and decoders, and self-describing values."""
