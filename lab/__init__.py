"""The policy lab: eviction policies on recorded prompts, the bounds they are measured against, and plots."""
