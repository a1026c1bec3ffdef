"""The shapes of language models, by name or configuration, and how large their caches are."""
