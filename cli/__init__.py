"""The `kvstore` command line: one module for each command."""
