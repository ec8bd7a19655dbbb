"""Named bounds, each with its reason. Nothing else in casckpt hard-codes a size.

Sizes are in bytes, times in seconds.
"""

from __future__ import annotations

MIB = 1 << 20

# --- layout of payloads ---
CHUNK_SIZE = MIB  # measured: 256 KiB costs 10-20 % on writes and four times the ids; 4 MiB falls out of the L2 cache
CHUNK_SIZE_MIN, CHUNK_SIZE_MAX = 4096, 16 * MIB  # what a store may set; the maximum bounds a decoder's allocation
SMALL_BLOCK_LIMIT = 64 * 1024  # smaller blocks share chunks; larger ones start their own, so 200 B of index is < 0.4 %
NODE_FANOUT = 1024  # chunk ids per manifest node: 32 KiB, rewritten when one chunk of 1 GiB changes

PREDICTED_SIZE_MIN = MIB  # of a commit: below it, looking for optimizers costs more than predictions save

# --- files ---
PACK_TARGET_SIZE = 64 * MIB  # large enough for streaming, small enough for a collector to rewrite
INLINE_LIMIT = 64 * 1024  # commits with no more new stored bytes live inside their timeline entry: one durable file
ENTRY_SIZE_MAX = 4 * MIB  # a timeline entry larger than this is refused before it is read
ENTRIES_PER_SHARD = 1000  # timeline files per folder, so that listing on doubt stays small
ENTRIES_PER_EPOCH = 100  # sealed into one file: a hundredth of the files, and a small store has few that wait
OBJECT_SIZE_MAX = 64 * MIB  # structures and manifests of state with very many leaves; chunks are far smaller
RECORD_ALIGNMENT = 64  # payloads in packs start on a cache line, so raw Arrow segments can be mapped
PACK_COUNT_PER_ENTRY_MAX = 65536
GAP_MAX = 1_000_000  # numbers missing in a row, as in a copy under way; what lies beyond is a stray file

# --- state trees ---
TREE_DEPTH_MAX = 256  # deeper trees are refused on both sides; Python's own recursion limit lies above
LEAF_COUNT_MAX = 10_000_000
KEY_SIZE_MAX = 4096
RANK_MAX = 64  # dimensions of a tensor (numpy's own bound)
NAME_SIZE_MAX = 200  # run, branch, tag and component names, in UTF-8 bytes: they end up in index keys (511 at most)

# --- replay ---
SEGMENT_SIZE_MIN = MIB  # rows that one commit stores together, in bytes: cut smaller, columns lie in mixed chunks
SEGMENT_SIZE_MAX = 16 * MIB  # what a ring may hold of rows that are gone, and a restore that needs one row looks up
PICTURE_CHUNK_SIZE = 4 * MIB  # of segments with pictures: a sixth smaller than in chunks of 1 MiB, and twice as fast
SEGMENT_SHARE = 16  # of a ring's capacity: the same bound for small rings
GROUP_LEVEL_MAX = 8  # groups of groups: 32**8 segments

# --- index ---
INDEX_COMPACTED_MAX = MIB  # of a data file: larger ones are a small part of their store, and take longer to copy

# --- memory and threads ---
BATCH_SIZE = 8 * MIB  # bytes hashed or read per pool task: smaller tasks halve the rate
SINGLE_THREAD_SIZE = MIB  # up to here one thread is done before another has started
POOL_THREADS_MAX = 8

# --- time ---
LOCK_TIMEOUT_S = 30.0  # then BusyError names the holder
DRAIN_TIMEOUT_S = 600.0  # saves under way at the end: longer than any disk needs, short enough that a hang is noticed
LEASE_PULSE_S = 5.0  # a reader's counter moves so often while it reads
LEASE_TIMEOUT_S = 30.0  # a lease whose counter stands still for so long is dead
BEAT_PERIOD_S = 5.0  # a process of a training says so often that it is alive
BEAT_TIMEOUT_S = 30.0  # and is dead after so long without news, by the observer's clock: five beats may get lost
SAMPLE_BEHIND_MAX = 300  # learner steps that the policy of a sample may be old
PROBE_TIMEOUT_S = 20.0  # a suspect index is opened in a subprocess that may not take longer
