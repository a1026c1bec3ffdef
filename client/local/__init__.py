"""Lock-free access to blocks of nodes on this host, through shared memory: no effects, no round trip."""
