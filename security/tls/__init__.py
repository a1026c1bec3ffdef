"""TLS of every connection that leaves the host: settings, certificates and their roles, and a socket that speaks it."""
