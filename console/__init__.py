"""The cluster as an operator sees it: what it is now, an hour of what it was, and the page that shows both."""
