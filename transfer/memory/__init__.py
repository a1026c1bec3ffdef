"""Memory that transfers touch: registered regions, what peers may have of it, mappings of other processes' memory, and copies."""
