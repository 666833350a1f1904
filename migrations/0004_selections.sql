-- Selections are facts of their episodes, which only the store sets; episodes/selections.py describes them.

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
    coalesce(json_keys(e.info, '$._selections.members'), []) AS selections,
    e.trajectory_id,
    e.live_rows,
    e.info
FROM episode_rows AS e
LEFT JOIN sources AS s ON s.number = e.source;

-- The names have no slash, so a JSON pointer with a name needs one escape.
CREATE VIEW selections AS
WITH marked AS (
    SELECT episode_id, live_rows < length AS is_missing, info -> '$._selections' AS marks
    FROM episode_rows
    WHERE contains(info::VARCHAR, '"_selections"')
),
named AS (
    SELECT *, true AS is_member, unnest(json_keys(marks, '$.members')) AS name FROM marked
    UNION ALL
    SELECT *, false AS is_member, unnest(json_keys(marks, '$.excluded')) AS name FROM marked
),
pointed AS (
    SELECT *, replace(name, '~', '~0') AS pointer FROM named
),
found AS (
    SELECT
        name,
        min_by(marks -> ('/definitions/' || pointer), episode_id)
            FILTER ((marks -> ('/definitions/' || pointer)) IS NOT NULL) AS definition,
        count(*) FILTER (is_member) AS episodes,
        count(*) FILTER (NOT is_member) AS excluded,
        count(*) FILTER (is_member AND is_missing) AS missing
    FROM pointed
    GROUP BY name
)
SELECT
    name,
    definition ->> '$.condition' AS condition,
    episodes,
    excluded,
    missing,
    nullif(definition ->> '$.by', '') AS author,
    nullif(definition ->> '$.reason', '') AS reason,
    make_timestamp((definition ->> '$.time')::BIGINT) AS created,
    definition ->> '$.version' AS version,
    definition ->> '$.store' AS store
FROM found;
