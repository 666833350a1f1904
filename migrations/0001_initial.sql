-- The index of one store. Derived: columns, journal and episodes.log rebuild it.
-- No PRIMARY KEY, no secondary index and no DEFAULT: each has lost or refused data when DuckDB replayed
-- its log after a crash, and rows that arrive in the order of their ids do not need them.

CREATE TABLE store (uuid VARCHAR);

-- A session is one writer's life; ended is NULL while it may write.
CREATE TABLE sources (
    number BIGINT,
    name VARCHAR,
    named BOOLEAN,
    generation BIGINT,
    session VARCHAR,
    started TIMESTAMP,
    ended TIMESTAMP
);

CREATE TABLE episode_rows (
    episode_id BIGINT,
    source BIGINT,
    trajectory_id BIGINT,
    start_time TIMESTAMP,
    end_time TIMESTAMP,
    length BIGINT,
    "return" DOUBLE,
    status UTINYINT,
    live_rows BIGINT,
    last_id BIGINT,
    info JSON
);

-- An arithmetic run of one episode's rows: ids first_id, first_id + stride, ... last_id.
CREATE TABLE fragment_rows (
    episode_id BIGINT,
    first_step BIGINT,
    length BIGINT,
    first_id BIGINT,
    stride BIGINT,
    last_id BIGINT
);

CREATE TABLE priorities (id BIGINT, priority FLOAT);

-- Rows with ids in (low_id, last_id] could be read when the commit was made.
CREATE TABLE commits (generation BIGINT, sequence BIGINT, low_id BIGINT, last_id BIGINT, "time" TIMESTAMP);

CREATE TABLE meta (key VARCHAR, value JSON);

CREATE VIEW episodes AS
SELECT
    e.episode_id,
    s.name AS source,
    e.trajectory_id,
    e.start_time,
    e.end_time,
    e.length,
    e."return",
    CASE e.status WHEN 0 THEN 'open' WHEN 1 THEN 'terminated' WHEN 2 THEN 'truncated' ELSE 'cut' END AS status,
    e.live_rows,
    e.info
FROM episode_rows AS e
LEFT JOIN sources AS s ON s.number = e.source;

-- The parts that could be read at the last commit.
CREATE VIEW fragments AS
WITH latest AS (
    SELECT low_id AS low, last_id AS high FROM commits ORDER BY generation DESC, sequence DESC LIMIT 1
),
clipped AS (
    SELECT
        f.episode_id,
        f.first_step,
        f.length,
        f.first_id,
        greatest(f.stride, 1) AS stride,
        CASE WHEN w.low < f.first_id THEN 0 ELSE (w.low - f.first_id) // greatest(f.stride, 1) + 1 END AS head,
        CASE WHEN w.high >= f.last_id THEN 0
            ELSE (f.last_id - w.high - 1) // greatest(f.stride, 1) + 1 END AS tail
    FROM fragment_rows AS f
    CROSS JOIN latest AS w
)
SELECT
    episode_id,
    first_step + head AS first_step,
    length - head - tail AS length,
    first_id + head * stride AS first_id,
    stride
FROM clipped
WHERE length > head + tail;
