-- Episodes begin with what people look for: id, source, length, return and status.

CREATE OR REPLACE VIEW episodes AS
SELECT
    e.episode_id,
    s.name AS source,
    e.length,
    e."return",
    CASE e.status WHEN 0 THEN 'open' WHEN 1 THEN 'terminated' WHEN 2 THEN 'truncated' ELSE 'cut' END AS status,
    e.start_time,
    e.end_time,
    e.trajectory_id,
    e.live_rows,
    e.info
FROM episode_rows AS e
LEFT JOIN sources AS s ON s.number = e.source;
