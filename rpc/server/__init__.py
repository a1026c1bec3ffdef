"""Server side of the frame protocol: listening sockets and sessions."""
