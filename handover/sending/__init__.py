"""Sending side of a rank: its requests, the parts to send next, and their transfer."""
