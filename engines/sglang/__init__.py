"""SGLang: a storage back end of its hierarchical cache."""
