"""Authentication and authorization: identities, credentials, permissions, tickets, quotas, TLS."""
