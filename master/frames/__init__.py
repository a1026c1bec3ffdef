"""The frames that clients and nodes say to the master, and what it says to nodes."""
