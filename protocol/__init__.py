"""Frames, messages, errors and the control plane's .proto: what crosses the wire, and nothing that moves it."""
