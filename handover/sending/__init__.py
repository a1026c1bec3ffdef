"""The giving side of a rank: its requests, what each may send next, and how it goes."""
