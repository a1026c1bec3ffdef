"""HTTP port of a daemon: server, access control and listener. The router's port for requests is separate."""
