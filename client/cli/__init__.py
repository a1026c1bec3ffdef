"""The kvstore command: a file a command, and the tables and charts that they print."""
