"""Differences between the drop-in and Mooncake's own package that stay, each with its reason: docs/engines.md has the same table."""

from typing import Final

DIFFERENCES: Final = {
    "larger_elements": "a buffer of elements larger than a byte is stored whole; Mooncake stores as many bytes as it has elements",
    "strided_buffers": "a buffer that is not contiguous is refused with -600; Mooncake stores the bytes that lie beside the elements",
    "null_pointers": "address 0 is refused with -600; Mooncake reports success and moves nothing",
    "keys_twice": "of a key that one batch has twice the first value is stored; Mooncake's calls differ among themselves",
    "larger_buffers": "several buffers with more room than the object are filled in part, as one is; one of 2^63 bytes is refused",
    "leases_of_reads": "a read leaves no lease: its value is the caller's own when it returns",
    "hard_pins": "an object with `with_hard_pin` needs `force` to be removed; Mooncake keeps it from eviction only",
    "no_dimensions": "a tensor without dimensions keeps its shape; Mooncake returns one of shape [1]",
    "parameters": "a torch Parameter is stored as a tensor; Mooncake refuses it by the name of its class",
    "shards_of_others": "an object that is no tensor refuses its own key; Mooncake refuses the whole batch",
    "ranges_beyond": "of a refused read the ranges before the refused one may have been read",
    "puts_beside_sessions": "a put of a key with an open put session stores the value; Mooncake reports success and stores nothing",
    "same_node": "`prefer_alloc_in_same_node` changes nothing; Mooncake refuses it over TCP",
    "empty_batches": "a batch has one result a key, without `setup`, too; Mooncake's `get_batch` has one for no key, others have none",
    "rare_patterns": "a pattern with a back reference, `\\c`, `\\x`, `\\u`, `[.x.]`, `[=x=]`, `[]` or two quantifiers in a row is refused",
    "other_name_of_the_master": "the dictionary of `setup` may say `master_server_address`, as Mooncake's own files do",
}
"""By the group of generated calls that shows it. A group that shows no difference any more has to go."""
LEFT_OUT: Final = {
    "store": {
        *("BufferLease", "BufferLeaseView", "BufferPool", "RegisteredBufferLease", "RegisteredBufferLeaseView", "RegisteredBufferPool"),
        *("EngramStore", "EngramStoreConfig", "MooncakeDistributedNoFRegister", "ParallelAxis", "ReadTarget", "TensorParallelism"),
        *("_get_pyclient_from_wrapper", "bind_to_numa_node", "get_alloc_func_addr", "get_free_func_addr"),
    },
    "store.MooncakeDistributedStore": {
        *("_get_pyclient_capsule", "allocate_and_mount_segment", "mount_segment", "unmount_and_free_segment", "unmount_segment"),
        *("unmount_local_disk_segment", "get_offload_rpc_read_count", "batch_replica_clear", "create_copy_task", "create_move_task"),
        *("query_task", "get_tensor_with_parallelism", "get_tensor_with_parallelism_into", "batch_get_tensor_with_parallelism"),
        *("batch_get_tensor_with_parallelism_into", "put_tensor_with_parallelism", "put_tensor_with_parallelism_from"),
        *("batch_put_tensor_with_parallelism", "batch_put_tensor_with_parallelism_from", "upsert_tensor_with_parallelism"),
        *("upsert_tensor_with_parallelism_from", "batch_upsert_tensor_with_parallelism", "batch_upsert_tensor_with_parallelism_from"),
    },
    "engine": {
        *("CoroRPCInterface", "RpcInterface", "ReceivedData", "ReceivedTensor", "create_rpc_client", "create_rpc_server"),
        *("InnerTransferEngine", "SharedSegment"),
    },
    "engine.TransferEngine": {"get_engine_ptr"},
}
"""Names of Mooncake's that the drop-in has not, by module and class. Those of the store belong to segments, tasks, BufferPool,
TensorParallelism, the Engram store, NVMe over fabrics, or the allocator of Mooncake's client; those of the engine to its RPC and to C++."""
