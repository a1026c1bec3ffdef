"""Policy lab: eviction policies on recorded prompts, upper bounds, models of serving clusters, and plots."""
