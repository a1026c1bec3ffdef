"""Web console for operators: current state of the cluster, an hour of history, and the page."""
