"""Cache of KV tensors over a Client: blocks keyed by token ids, split by layers and heads, shared by engines of any
parallelism."""
