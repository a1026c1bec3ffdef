"""Multi-path transfers: rails, routes, choice of paths by load, rate and distance, retries after failures."""
