"""The catalog in etcd: several masters follow it, and the elected one owns it under a lease."""
