"""KVCache-centric dispatch of requests: Algorithm 1, its estimators, the baselines, and the cluster simulator. Pure."""
