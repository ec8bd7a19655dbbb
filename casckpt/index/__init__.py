"""The disposable index: everything in it follows from the timeline and the packs.

* `kv`: ordered tables with transactions, and an in-memory implementation that is the reference
* `lmdb_kv`: the LMDB implementation, the only importer of lmdb
* `lifecycle`: which generation is trusted, rebuilding, suspicion
* `lock`: the write lock between processes
* `tables`: what the rows mean
"""
