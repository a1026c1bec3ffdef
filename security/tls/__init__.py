"""TLS of connections between hosts: settings, certificates and their subjects, and a TLS socket."""
