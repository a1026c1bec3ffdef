"""What happens to the store's blocks, published as engines publish their own KV events: for routers and indexes that are not kvstore's."""
