"""What must survive the master: the interface, and catalogs in etcd, LMDB and memory."""
