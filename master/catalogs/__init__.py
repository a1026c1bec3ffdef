"""Durable records of the directory: the catalog interface, and catalogs in etcd, LMDB and memory."""
