"""Names and bytes: the file system behind a store. Knows nothing of objects, snapshots or LMDB."""
