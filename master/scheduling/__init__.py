"""The live scheduler: what instances report, and where requests go."""
