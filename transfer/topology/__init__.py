"""Topology of a host: NUMA nodes, NICs, GPUs and links, discovered here or described by a peer. Facts; paths/ chooses."""
