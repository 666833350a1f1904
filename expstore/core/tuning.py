"""Sizes, counts and intervals that trade memory, speed and latency against each other.

Every value is read when it is used, so that a program or a test can change one before it opens a store:
`tuning.FLAT_SHARD_ROWS = 4096`. The defaults were measured. No value changes the content of a store, and a
store written with other values can be opened with these. A value that a store's own files contain (rows per
shard, rows per chunk) is read from there once the store exists.

Threads and processes: plain module attributes of one process; a forked child inherits them.
"""

from __future__ import annotations

# -- rings and journals -----------------------------------------------------------------------------------

#: Slots of a ring beyond its capacity; None: an eighth of the capacity, but enough for a busy writer
#: (see `expstore.core.spare_slots`).
SPARE_SLOTS: int | None = None
#: Rows that may wait for a checkpoint in a store without a capacity.
UNBOUNDED_SPARE_ROWS = 65_536
#: Bytes of a journal segment with `durability="process"`.
JOURNAL_SEGMENT_BYTES = 4 << 20
#: With `durability="sync"` a batch of at most this many bytes is written into its commit record.
INLINE_BATCH_BYTES = 1 << 20
#: A batch of at most this many rows and bytes stays in the journal and in the memtable for a while. Its rows
#: are written to the journal and to the columns, so only small batches become faster: 16 rows by a quarter,
#: 128 rows not at all.
MEMTABLE_BATCH_ROWS = 64
MEMTABLE_BATCH_BYTES = 16 * 1024
#: Rows, and bytes, in the memtable at which they are written to the columns.
MEMTABLE_ROWS = 256
MEMTABLE_BYTES = 4 << 20
#: Bytes of values that a replace record contains at most; more are written to a separate file.
REPLACE_RECORD_BYTES = 64 << 20
#: Bytes of replaced rows that may wait in memory for a checkpoint; a writer that exceeds this waits for one.
REPLACED_ROWS_BYTES = 64 << 20
#: Closing a store removes journals longer than this many bytes.
CLOSED_JOURNAL_BYTES = 128 * 1024
#: Number of idempotency keys that a store remembers: the newest ones.
IDEMPOTENCY_KEYS = 100_000
#: Entries of the file of idempotency keys. The entries in excess of `IDEMPOTENCY_KEYS` are for keys that no
#: checkpoint has synced yet: a valid entry must not be overwritten before newer entries are synced.
IDEMPOTENCY_SLOTS = 1 << 17
#: Whether closing a store brings its index up to date. Without it the first query after reopening does.
INDEX_ON_CLOSE = True

# -- checks for tests --------------------------------------------------------------------------------------

#: Whether storages that are opened from now on assert the order in which their locks are taken.
CHECK_LOCK_ORDER = False

# -- background work --------------------------------------------------------------------------------------

#: Seconds between two background checkpoints.
CHECKPOINT_SECONDS = 1.0
#: Seconds between two background writes of priorities.
PRIORITY_SECONDS = 0.1
#: Seconds between two runs of a retention policy.
RETENTION_SECONDS = 5.0
#: Seconds that flushing may take after SIGTERM.
SIGTERM_SECONDS = 10.0

# -- readers of a store that another process writes -------------------------------------------------------

#: Seconds without a heartbeat after which a writer counts as stopped; a writer has four heartbeats a second.
HEARTBEAT_SECONDS = 2.0
#: Seconds that a reader waits for rows that the writer is changing in place.
CHANGE_SECONDS = 1.0
#: Seconds during which a query is repeated if the writer keeps overwriting its rows.
QUERY_RETRY_SECONDS = 2.0

# -- flat columns -----------------------------------------------------------------------------------------

#: The most rows of a shard of a flat column.
FLAT_SHARD_ROWS = 1 << 20

# -- packed columns ---------------------------------------------------------------------------------------

#: Rows of a shard of a packed column in a store with a capacity, and without one.
PACKED_SHARD_ROWS = 4096
UNBOUNDED_PACKED_SHARD_ROWS = 16384
#: The smallest and the largest number of earlier rows that are searched for equal rows.
PACKED_LOOKBACK_ROWS = 16, 1024
#: Chunks that are collected in memory and compressed together.
PACKED_CHUNKS_TOGETHER = 64
#: Bytes for which one more thread decompresses: starting it costs 30 us.
DECOMPRESS_THREAD_BYTES = 8 << 20

# -- Arrow columns ----------------------------------------------------------------------------------------

#: Bytes and batches of a segment; a longer write gets a segment of its own length.
ARROW_SEGMENT_BYTES = 64 << 20
ARROW_SEGMENT_BATCHES = 1024
#: Approximate bytes of a batch; fewer with compression, because reading one row decompresses its whole batch.
ARROW_BATCH_BYTES = 8 << 20
ARROW_COMPRESSED_BATCH_BYTES = 16 << 10
#: Bytes that are encoded before they are written.
ARROW_WRITE_BYTES = 16 << 20
#: Bytes of the newest rows that the writer keeps in memory for each continued field.
CONTINUED_BYTES = 64 << 20
#: Rows of a continued field of which the process remembers that their values had their checksums.
CONTINUED_SOUND = 1 << 20
#: Rows of a continued field that are assembled at a time.
CONTINUED_ROWS = 1024
#: Bytes of a batch that compaction builds from short batches.
ARROW_COMPACTED_BYTES = 1 << 20
#: A segment of short batches is rewritten if it has more batches than this.
ARROW_COMPACTION_BATCHES = 64

# -- snapshots, SQL, samplers, exchange -------------------------------------------------------------------

#: The most files of a snapshot; beyond that its shards become longer.
SNAPSHOT_FILES = 16_000
#: Rows of a batch passed to DuckDB, and of the first batch if rows have variable length.
SQL_BATCH_ROWS = 65_536
SQL_FIRST_ROWS = 256
#: Bytes of packed rows that a query decompresses at a time, and in total at most.
SQL_BATCH_BYTES = 1 << 20
SQL_PACKED_BYTES = 1 << 30
#: Rows that are searched at a time for the steps that complete a slice.
SLICE_SEARCH_ROWS = 1 << 15
#: Rows and bytes that an export or import handles at a time, and rows if they have variable length.
EXCHANGE_ROWS = 65_536
EXCHANGE_BYTES = 64 << 20
EXCHANGE_VARIABLE_ROWS = 256
#: The most rows of a Parquet file.
PARQUET_FILE_ROWS = 1 << 20

#: Number of ended sessions that a store remembers: remote ones, which may return, and the newest of each
#: named source.
ENDED_SESSIONS = 256
#: The most episodes of one ended session that may be opened again: the newest.
CUT_EPISODES = 10_000
#: Seconds between two messages that tell a server that a connection that has written is still open.
CONNECTION_HEARTBEAT_SECONDS = 60.0
