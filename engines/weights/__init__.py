"""Identity of a model's weights: a fingerprint of the checkpoint's bytes, or a version that the engine named. Knows no engine."""
