"""Generated calls of setup, configurations, and names of the module."""

from collections.abc import Iterator

from tests.engines.live.mooncake.differential.material import Call, Json, Material, at, call


class SetupCalls(Material):
    """A group of calls a method."""

    def configurations(self) -> Iterator[Call]:
        """Yield puts with each kind of configuration."""
        config: list[dict[str, Json]] = [
            *({}, {"replica_num": 1}, {"replica_num": 2}, {"replica_num": 0}, {"soft_pin_ttl_ms": 5}),
            *({"soft_pin_action": {"$enum": ["SoftPinAction", "ENABLE"]}}, {"soft_pin_action": {"$enum": ["SoftPinAction", "DISABLE"]}}),
            {"soft_pin_action": {"$enum": ["SoftPinAction", "ENABLE"]}, "soft_pin_ttl_ms": 50},
            *({"group_ids": ["g"]}, {"group_ids": ["g", "h"]}, {"group_ids": []}, {"group_ids": [""]}, {"preferred_segments": ["nowhere"]}),
            *({"preferred_segment": "nowhere"}, {"preferred_segments": ["a", "b"]}, {"data_type": {"$enum": ["ObjectDataType", "WEIGHT"]}}),
        ]
        for given in config:
            key, made = self.key(), {"$config": given}
            yield call(self.random.choice(("put", "upsert")), key, self.bytes(), made)
            yield call("is_exist", key)
            yield call("remove", key, True)
            yield call("batch_put_from", [self.key(), self.key()], [at(0), at(5)], [5, 5], made)
            yield call("put_batch", [self.key(), self.key()], [self.bytes(), self.bytes()], config=made)
            yield call("put_parts", self.key(), self.bytes(), config=made)
            yield call("batch_put_from_multi_buffers", [self.key()], [[at(0)]], [[4]], made)
        for name, value in (
            *(
                ("replica_num", -1),
                ("replica_num", "1"),
                ("replica_num", {"$numpy": ["int64", 2]}),
                ("replica_num", 1.5),
                ("with_hard_pin", 1),
            ),
            *(
                ("with_hard_pin", None),
                ("with_hard_pin", "yes"),
                ("soft_pin_ttl_ms", None),
                ("soft_pin_ttl_ms", -1),
                ("soft_pin_ttl_ms", 2**64),
            ),
            *(
                ("soft_pin_ttl_ms", "1"),
                ("group_ids", "g"),
                ("group_ids", None),
                ("group_ids", [1]),
                ("preferred_segments", "x"),
                ("data_type", 3),
            ),
            *(
                ("preferred_segment", 5),
                ("preferred_segments", {"$tuple": ["a"]}),
                ("soft_pin_action", 1),
                ("no_such_field", 1),
                ("data_type", "KVCACHE"),
            ),
            *(
                ("replica_num", True),
                ("soft_pin_ttl_ms", {"$numpy": ["int64", 7]}),
                ("soft_pin_ttl_ms", 1.5),
                ("prefer_alloc_in_same_node", 0),
            ),
        ):
            yield call("$attribute", "ReplicateConfig", name, value)
        yield call("put", self.key(), self.bytes(), None)
        yield call("put", self.key(), self.bytes(), {"replica_num": 1})
        yield call("put", self.key())
        yield call("put", key=self.key(), value=self.bytes())
        yield call("put", self.key(), self.bytes(), no_such=1)
        yield call("put_batch", keys=[self.key()], values=[self.bytes()])
        yield call("get", key=self.key())
        yield call("get_into", key=self.key(), buffer_ptr=at(0), size=5)

    def unset(self) -> Iterator[Call]:
        """Stores that are not set up. Calls that end the original's process (put, is_exist and others) are left out."""
        rows: list[tuple[str, list[Json]]] = [
            *(("upsert", ["k", {"$bytes": [1, 5]}]), ("put_from", ["k", at(0), 5]), ("batch_upsert_from", [["k"], [at(0)], [5]])),
            *(("get", ["k"]), ("get_batch", [["k"]]), ("batch_get_session_end", [["k"]]), ("health_check", []), ("close", [])),
            *(("get_tensor", ["k"]), ("batch_get_tensor", [["k"]]), ("put_tensor", ["k", {"$tensor": ["int32", [2]]}])),
            *(("batch_put_tensor", [["k"], [{"$tensor": ["int32", [2]]}]]), ("get_tensor_into", ["k", at(0), 500])),
            *(("batch_get_tensor_into", [["k"], [at(0)], [500]]), ("put_tensor_with_tp", ["k", {"$tensor": ["int32", [2]]}, 0, 2])),
            *(("get_tensor_with_tp_into", ["k", at(0), 500, 0, 2]), ("batch_get_tensor_with_tp_into", [["k"], [at(0)], [500], 0, 2])),
            *(("put_tensor_with_tp_from", ["k", at(0), 500, 0, 2]), ("batch_put_tensor_with_tp_from", [["k"], [at(0)], [500], 0, 2])),
            *(("save_tensor_to_safetensor", ["k"]), ("load_tensor_from_safetensor", ["k", "nowhere"])),
            *(
                ("pub_tensor", ["k", {"$tensor": ["int32", [2]]}]),
                ("upsert_parts", ["k", {"$bytes": [1, 5]}]),
                ("upsert_batch", [["k"], [{"$bytes": [1, 5]}]]),
            ),
            *(("get_tensor_into_cuda", ["k", {"$tensor": ["int32", [2]]}]), ("upsert_from", ["k", at(0), 5])),
        ]
        for name, arguments in rows:
            yield call("$unset", name, *arguments)

    def setups(self) -> Iterator[Call]:
        """Arguments of setup."""
        good: dict[str, Json] = {"local_hostname": "localhost", "metadata_server": "P2PHANDSHAKE", "master_server_addr": "MASTER"}
        size = 16 << 20
        plain: list[Json] = ["localhost", "P2PHANDSHAKE", size, size, "tcp", "", "MASTER"]
        yield call("$setup", *plain)
        yield call("$setup", good)
        yield call("$setup", config=good)
        yield call(
            "$setup",
            **dict(zip((*list(good)[:2], "global_segment_size", "local_buffer_size", "protocol", "rdma_devices"), plain[:6], strict=True)),
            master_server_addr="MASTER",
        )
        for name, value in (
            *(("local_buffer_size", "16MB"), ("local_buffer_size", "16 MB"), ("local_buffer_size", str(size)), ("local_buffer_size", "0")),
            *(("local_buffer_size", "some"), ("local_buffer_size", "-1"), ("local_buffer_size", 1), ("global_segment_size", "50%")),
            *(("global_segment_size", "1"), ("global_segment_size", 32 << 20), ("global_segment_size", "16mb"), ("tenant_id", "")),
            *(
                ("protocol", "tcp"),
                ("client_http_port", "x"),
                ("no_such_key", "1"),
                ("enable_ssd_offload", "false"),
                ("local_hostname", ""),
            ),
            *(("metadata_server", ""), ("local_buffer_size", "1e7"), ("local_buffer_size", "16MiB"), ("local_buffer_size", "0.5GB")),
        ):
            yield call("$setup", {**good, name: value})
        for name in good:
            if name != "master_server_addr":
                yield call("$setup", {key: value for key, value in good.items() if key != name})
        yield call("$setup", {})
        rows: list[tuple[int, Json]] = [
            (2, "16MB"),
            (2, -1),
            (3, "16MB"),
            (3, 0),
            (2, 0),
            (0, ""),
            (0, 5),
            (2, None),
            (2, 1.5),
            (3, {"$numpy": ["int64", size]}),
        ]
        for index, value in rows:
            yield call("$setup", *[*plain[:index], value, *plain[index + 1 :]])
        yield call("$setup", "localhost")
        yield call("$setup")
        yield call("$setup", *plain[:6])
        yield call("$setup", *plain, None, False, "", "default")
        yield call("$setup", *plain, tenant_id="default")
        yield call("$setup", *plain, no_such=1)
        for name in ("health_check", "get_batch"):
            yield call("$closed", name, *([["k"]] if name == "get_batch" else []))
        yield call("$closed", "close")

    def lease_ends(self) -> Iterator[Call]:
        """A lease is over after a while, and no sooner."""
        key = self.key("lease")
        yield call("put", key, self.bytes())
        yield call("is_exist", key)
        yield call("remove", key)
        yield call("$eventually", 0, "remove", key)
        yield call("is_exist", key)

    def names(self) -> Iterator[Call]:
        """Yield calls that list the names of the modules and of their classes."""
        yield call("$names", "store")
        yield call("$names", "engine")
        for kind in ("TransferEngine", "TransferNotify"):
            yield call("$names", "engine", kind)
        for kind in ("MooncakeDistributedStore", "ReplicateConfig", "BufferHandle", "MooncakeHostMemAllocator", "ReplicaDescriptor"):
            yield call("$names", "store", kind)
        for kind in ("MemoryDescriptor", "DiskDescriptor", "Descriptor", "QueryTaskResponse"):
            yield call("$names", "store", kind)
        for kind in ("ObjectDataType", "ReplicaStatus", "SoftPinAction", "TaskType", "TaskStatus"):
            yield call("$constants", kind)
        yield call("$module", "_tensor_metadata_size")
        for name in ("COMPLETE", "TENSOR", "FAILED", "PROCESSING", "UNDEFINED", "SUCCESS", "REPLICA_COPY"):
            yield call("$module", name)
