"""Hand-over of KV cache between engines: copies blocks of a prefill executor to a decode executor with any sharding."""
