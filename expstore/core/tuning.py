"""Sizes, counts and intervals that trade memory, speed and latency against each other.

Every value is read when it is used, so that a program or a test can change one before it opens a store:
`tuning.FLAT_SHARD_ROWS = 4096`. The defaults were measured; nothing here changes what a store means, and a
store written with other values opens with these. A value that ends up in a store's own files (rows per shard,
rows per chunk) is read from there once the store exists.

Threads and processes: plain module attributes of one process; a child inherits them when it is forked.
"""

from __future__ import annotations

# -- rings and journals -----------------------------------------------------------------------------------

#: Slots of a ring beyond its capacity; None: an eighth of the capacity, but enough for a busy writer
#: (see `expstore.core.spare_slots`).
SPARE_SLOTS: int | None = None
#: Rows of a store without capacity that may wait for the disk.
UNBOUNDED_SPARE_ROWS = 65_536
#: Bytes of a journal segment with `durability="process"`.
JOURNAL_SEGMENT_BYTES = 4 << 20
#: With `durability="sync"` a batch of at most this many bytes is written into its commit record.
INLINE_BATCH_BYTES = 1 << 20
#: A batch of at most this many rows and bytes stays in the journal and in the memtable for a while. Both
#: files are written then, so that only small batches are faster: of 16 rows by a quarter, of 128 no more.
MEMTABLE_BATCH_ROWS = 64
MEMTABLE_BATCH_BYTES = 16 * 1024
#: So many rows of the memtable are written to the columns together.
MEMTABLE_ROWS = 256
#: A replace record keeps at most this many bytes itself; more go to a file of their own.
REPLACE_RECORD_BYTES = 64 << 20
#: Replaced rows that wait in memory for a checkpoint, in bytes; a writer that brings more waits for one.
REPLACED_ROWS_BYTES = 64 << 20
#: A store that closes removes journals longer than this.
CLOSED_JOURNAL_BYTES = 128 * 1024
#: Idempotency keys that a store remembers, the newest ones.
IDEMPOTENCY_KEYS = 100_000
#: Entries of the file of idempotency keys. The ones beyond `IDEMPOTENCY_KEYS` are for keys that no checkpoint
#: has brought to the disk yet: a known entry must not be overwritten before its successors are safe.
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

#: Seconds after which a writer that shows no heartbeat counts as stopped; it shows four a second.
HEARTBEAT_SECONDS = 2.0
#: Seconds that a reader waits for rows that the writer is changing in place.
CHANGE_SECONDS = 1.0
#: Seconds during which a query is repeated if the writer keeps overwriting its rows.
QUERY_RETRY_SECONDS = 2.0

# -- flat columns -----------------------------------------------------------------------------------------

#: Rows of a shard of a flat column, at most.
FLAT_SHARD_ROWS = 1 << 20

# -- packed columns ---------------------------------------------------------------------------------------

#: Rows of a shard of a packed column in a store with a capacity, and without one.
PACKED_SHARD_ROWS = 4096
UNBOUNDED_PACKED_SHARD_ROWS = 16384
#: Least and most earlier rows among which equal rows are looked for.
PACKED_LOOKBACK_ROWS = 16, 1024
#: Chunks that are compressed together, and wait in memory for it.
PACKED_CHUNKS_TOGETHER = 64
#: A thread more decompresses for every so many bytes: it costs 30 us.
DECOMPRESS_THREAD_BYTES = 8 << 20

# -- Arrow columns ----------------------------------------------------------------------------------------

#: Bytes, and batches, of a segment; a write that is longer gets a segment as long as it needs.
ARROW_SEGMENT_BYTES = 64 << 20
ARROW_SEGMENT_BATCHES = 1024
#: Bytes of a batch, about; of a compressed one less, because one row of it decompresses the whole.
ARROW_BATCH_BYTES = 8 << 20
ARROW_COMPRESSED_BATCH_BYTES = 16 << 10
#: Bytes that are encoded before they are written.
ARROW_WRITE_BYTES = 16 << 20
#: Bytes of a batch that compaction makes of short ones.
ARROW_COMPACTED_BYTES = 1 << 20
#: A segment of more batches than this is rewritten if they are short.
ARROW_COMPACTION_BATCHES = 64

# -- snapshots, SQL, samplers, exchange -------------------------------------------------------------------

#: Files of a snapshot, at most: longer shards rather than more files.
SNAPSHOT_FILES = 16_000
#: Rows of a batch that DuckDB is given, and for rows without a fixed size of the first one.
SQL_BATCH_ROWS = 65_536
SQL_FIRST_ROWS = 256
#: Bytes of packed rows that are decompressed at a time for a query, and at most for one query.
SQL_BATCH_BYTES = 1 << 20
SQL_PACKED_BYTES = 1 << 30
#: Rows that are searched at a time for steps that complete a slice.
SLICE_SEARCH_ROWS = 1 << 15
#: Rows and bytes that an export or import handles at a time, and rows without a fixed size.
EXCHANGE_ROWS = 65_536
EXCHANGE_BYTES = 64 << 20
EXCHANGE_VARIABLE_ROWS = 256
#: Rows of a Parquet file, at most.
PARQUET_FILE_ROWS = 1 << 20

#: Ended sessions that a store remembers: remote ones, which may return, and the newest of each named source.
ENDED_SESSIONS = 256
#: Episodes of one ended session that may be opened again, the newest.
CUT_EPISODES = 10_000
#: Seconds between two messages that tell a server that a connection which has written is still open.
CONNECTION_HEARTBEAT_SECONDS = 60.0
