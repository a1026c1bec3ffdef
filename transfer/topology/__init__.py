"""What joins memory and rails: NUMA nodes, NICs, GPUs, links and routes, as found on this host or told by a peer. Facts; paths/ chooses."""
