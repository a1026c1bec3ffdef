"""What a block is: the namespace that its values belong to and the chained hash of its prefix. Pure: no clock, no files, no sockets."""
