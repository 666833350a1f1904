-- Episodes have a split, which is a fact that only the store sets.

CREATE OR REPLACE VIEW episodes AS
SELECT
    e.episode_id,
    s.name AS source,
    e.length,
    e."return",
    CASE e.status WHEN 0 THEN 'open' WHEN 1 THEN 'terminated' WHEN 2 THEN 'truncated' ELSE 'cut' END AS status,
    e.start_time,
    e.end_time,
    coalesce(e.info ->> '$._split', 'train') AS split,
    e.trajectory_id,
    e.live_rows,
    e.info
FROM episode_rows AS e
LEFT JOIN sources AS s ON s.number = e.source;
