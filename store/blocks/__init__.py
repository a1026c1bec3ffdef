"""The block table over the tiers: what a node holds, where, who uses it, what leaves. Pure bookkeeping."""
