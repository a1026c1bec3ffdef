"""Which block leaves a tier: the interface, its conformance suite, and the policies."""
