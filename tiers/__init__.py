"""Storage tiers: the Tier interface, its three implementations (hbm, dram, nvme) and the eviction policies."""
