"""A cache of tensors over a Client: blocks named by token ids, cut by layers and heads, shared by engines of any sharding."""
