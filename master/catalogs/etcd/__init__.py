"""The catalog in etcd: many masters, one of which owns it under a lease."""
