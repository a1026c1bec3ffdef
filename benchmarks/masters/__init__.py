"""What masters take and how long they pause: a part a file."""
