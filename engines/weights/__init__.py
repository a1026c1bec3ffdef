"""Identity of a model's weights: a fingerprint of the checkpoint, or a version that the engine named.
Engine-independent."""
