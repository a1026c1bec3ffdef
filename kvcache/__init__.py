"""What a block is: the namespace that its values belong to and the chained hash of its prefix; and prompts as chains of blocks, read from
traces or generated. No clock, no sockets."""
