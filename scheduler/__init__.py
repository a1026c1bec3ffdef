"""KVCache-centric request scheduling: Algorithm 1, baselines, time estimators and admission control. Pure."""
