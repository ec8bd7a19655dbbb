"""Everything that can delete. Nothing is here yet: retention, collection and compaction build on the store."""
