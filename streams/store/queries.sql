-- Every statement that a worker sends.
--
-- The file can be pasted into psql, as a worker's role, to prepare all statements. To run one, for example with these
-- values (its comment explains the parameters):
--   BEGIN;
--   EXECUTE settings ('anabranch.principals', '["user:1"]', '10000', '400', false);
--   EXPLAIN (ANALYZE, BUFFERS) EXECUTE search_exactly (
--     array_fill(1::real, '{768}')::vector, NULL, NULL, NULL, NULL, NULL, '{year,2020}', 15, false, 1001);
--   EXECUTE search_approximately (
--     array_fill(1::real, '{768}')::vector, NULL, NULL, NULL, NULL, NULL, NULL, 15, false, 60);
--   EXECUTE sizes ('{00000000-0000-0000-0000-000000000001}');
--   EXECUTE passages ('{00000000-0000-0000-0000-000000000001}');
--   EXECUTE probe;
--   COMMIT;
-- After a change, paste only what changed, and first DEALLOCATE the statements. A fragment changes nothing by itself:
-- paste the statements that use it again.
--
-- `-- name:` starts a statement or a fragment. :scope and the like insert the fragment of that name.
-- Optional parameters are written as `$n IS NULL OR …`: with force_custom_plan, the planner sees the values and drops
-- unused conditions, so each combination of scope and filters gets its own plan.

-- name: begin
BEGIN TRANSACTION ISOLATION LEVEL READ COMMITTED READ ONLY;

-- name: settings
-- The requesting principals and the settings, until the end of the transaction: this works with a pooler in transaction
-- mode, and nothing remains for the next event on this connection.
PREPARE settings AS
SELECT set_config($1, $2, true),
       -- The time left until the search's deadline, in milliseconds: the limit if the server loses the client.
       set_config('statement_timeout', $3, true),
       -- A client that gives up closes the connection. The server checks for this at this interval, in milliseconds.
       set_config('client_connection_check_interval', '250', true),
       set_config('hnsw.ef_search', $4, true),
       -- After the first candidates, `strict_order` discards rows that it finds out of order. Fetching more rows in
       -- relaxed order and sorting them misses fewer.
       set_config('hnsw.iterative_scan', 'relaxed_order', true),
       -- Otherwise the server's own limit applies.
       CASE WHEN $5 THEN set_config('hnsw.max_scan_tuples',
                                    LEAST(NULLIF(current_setting('hnsw.max_scan_tuples', true), '')::int, 1000)::text,
                                    true) END,
       set_config('plan_cache_mode', 'force_custom_plan', true),
       -- As for data in memory. An index scan stops when enough rows were read. A bitmap scan, which a higher cost would
       -- favour, has to finish before it returns its first row.
       set_config('random_page_cost', '1', true),
       -- For the same reason: a hash or a sort has to finish before the first row, and parallel workers take longer to
       -- start than most searches take.
       set_config('enable_hashjoin', 'off', true),
       set_config('enable_mergejoin', 'off', true),
       set_config('max_parallel_workers_per_gather', '0', true),
       set_config('jit', 'off', true);

-- name: commit
COMMIT;

-- name: protected
-- Whether row-level security is active for this role on all tables that searches use. Evaluated once per statement (as
-- an InitPlan), in the same statement that returns the rows: its table locks prevent a change in between.
SELECT $fragment$
(SELECT pg_catalog.row_security_active('document_chunks'::regclass::oid)
    AND pg_catalog.row_security_active('documents'::regclass::oid)
    AND pg_catalog.row_security_active('chunk_topics'::regclass::oid)
    AND pg_catalog.row_security_active('chunk_metadata'::regclass::oid)
    AND pg_catalog.row_security_active('access_sets'::regclass::oid)) AS protected
$fragment$ AS protected \gset

-- name: filters
-- $4 section · $5 document type · $6 source URL prefix
SELECT $fragment$
  AND ($4::text IS NULL OR c.section = $4)
  AND ($5::text IS NULL OR d.document_type = $5)
  AND ($6::text IS NULL OR d.source_url ^@ $6)
$fragment$ AS filters \gset

-- name: metadata_filter
-- $7 metadata, as an array of alternating keys and values; compared in the form that results use.
SELECT $fragment$
NOT EXISTS (
  SELECT FROM generate_series(1, cardinality($7::text[]), 2) i
  CROSS JOIN LATERAL (SELECT COALESCE(c.metadata -> $7[i], d.metadata -> $7[i])) held (value)
  WHERE $7[i + 1] IS DISTINCT FROM public.anabranch_metadata_text(held.value))
$fragment$ AS metadata_filter \gset

-- name: scope
-- $2 session · $3 topic (the local arm)
-- Written for the ordinary indexes. The topic's chunks come from a table keyed by topic, and chunks with given metadata
-- from a table keyed by key and value: the first two pairs of $7, so that the planner can start with the rarer one. No
-- index supports the policies (the schema explains why). So their condition is repeated here if neither a session nor
-- a filter narrows the scope: on the documents if they are filtered, because they are fewer, else on the chunks.
-- Every filter belongs in the first of these two conditions, those on documents also in the second.
SELECT $fragment$
FROM document_chunks c
LEFT JOIN documents d ON d.id = c.document_id
LEFT JOIN chunk_topics t ON t.topic_id = $3 AND t.session_id = $2 AND t.chunk_id = c.id
LEFT JOIN chunk_metadata m1 ON m1.chunk_id = c.id
                           AND m1.entry = public.anabranch_metadata_entry(($7::text[])[1], $7[2])
LEFT JOIN chunk_metadata m2 ON m2.chunk_id = c.id AND m2.entry = public.anabranch_metadata_entry($7[3], $7[4])
WHERE c.embedding IS NOT NULL
  AND ($2::uuid IS NULL OR c.session_id = $2)
  AND ($3::uuid IS NULL OR t.chunk_id IS NOT NULL)
  AND ($7 IS NULL OR m1.chunk_id IS NOT NULL)
  AND ($7 IS NULL OR cardinality($7) = 2 OR m2.chunk_id IS NOT NULL)
  AND ($7 IS NULL OR cardinality($7) <= 4 OR :metadata_filter)
  AND ($2::uuid IS NOT NULL OR $4::text IS NOT NULL OR $5::text IS NOT NULL OR $6::text IS NOT NULL
       OR $7 IS NOT NULL OR c.access_set_id = ANY (ARRAY(SELECT id FROM access_sets)))
  AND ($2::uuid IS NOT NULL OR $5::text IS NULL AND $6::text IS NULL
       OR d.access_set_id = ANY (ARRAY(SELECT id FROM access_sets)))
:filters
$fragment$ AS scope \gset

-- name: candidates
-- The columns that a search returns for each row of `nearest`. $9: whether parents replace problems.
-- A parent replaces a problem only if it also matches the event's session and filters (and is readable, by the
-- policies). It need not match the topic: the session is the event's scope, and a parent may lack its children's topics.
SELECT $fragment$
SELECT n.id, n.distance, p.id AS parent_id,
       ($9 AND n.chunk_type = 'problem' AND n.parent_chunk_id IS NOT NULL AND p.id IS NULL) IS TRUE AS parent_missing
FROM nearest n
LEFT JOIN LATERAL (
  SELECT found.id
  FROM (
    SELECT c.id, c.session_id, c.section, c.metadata AS chunk_metadata,
           d.document_type, d.source_url, d.metadata AS document_metadata
    FROM document_chunks c
    LEFT JOIN documents d ON d.id = c.document_id
    WHERE $9 AND n.chunk_type = 'problem' AND c.id = n.parent_chunk_id
    -- An optimization fence: both rows are found by their keys, whatever the planner estimates for a filter's index.
    OFFSET 0
  ) found
  CROSS JOIN LATERAL (SELECT found.section, found.chunk_metadata) c (section, metadata)
  CROSS JOIN LATERAL (SELECT found.document_type, found.source_url, found.document_metadata)
    d (document_type, source_url, metadata)
  WHERE ($2::uuid IS NULL OR found.session_id = $2)
    AND ($7::text[] IS NULL OR :metadata_filter)
  :filters
) p ON true
$fragment$ AS candidates \gset

-- name: search_exactly
-- $1 query vector · $8 rows · $10 maximum number of rows to scan
-- Reads up to $10 rows of the scope and computes each distance; an approximate index cannot provide this order.
-- If `rows_scanned` is $10, there may be more rows, and the result must not be used.
PREPARE search_exactly AS
WITH scanned AS MATERIALIZED (
  SELECT c.id, c.embedding <=> $1 AS distance, c.chunk_type, c.parent_chunk_id
  :scope
  LIMIT $10
), nearest AS MATERIALIZED (
  SELECT id, distance, chunk_type, parent_chunk_id FROM scanned ORDER BY distance, id LIMIT $8
), answer AS (
  :candidates
)
SELECT *, (SELECT count(*) FROM scanned) AS rows_scanned, :protected FROM answer;

-- name: search_approximately
-- $1 query vector · $8 rows · $10 rows to find
-- Written for the HNSW index, which returns rows approximately in order of distance; the conditions filter row by row.
-- It stops after hnsw.max_scan_tuples; then `rows_scanned` is less than $10. `+ 0`: PostgreSQL trusts the index's
-- order and would otherwise not sort again.
PREPARE search_approximately AS
WITH scanned AS MATERIALIZED (
  SELECT c.id, c.embedding <=> $1 AS distance, c.chunk_type, c.parent_chunk_id
  FROM document_chunks c
  LEFT JOIN documents d ON d.id = c.document_id
  WHERE c.embedding IS NOT NULL
    AND ($2::uuid IS NULL OR c.session_id = $2)
    AND ($3::uuid IS NULL OR $3 = ANY (c.related_topic_ids))
    AND ($7::text[] IS NULL OR :metadata_filter)
  :filters
  ORDER BY c.embedding <=> $1, c.id
  LIMIT $10
), nearest AS MATERIALIZED (
  SELECT id, distance, chunk_type, parent_chunk_id FROM scanned ORDER BY distance + 0, id LIMIT $8
), answer AS (
  :candidates
)
SELECT *, (SELECT count(*) FROM scanned) AS rows_scanned, :protected FROM answer;

-- name: sizes
-- For candidates that a token budget may skip: gets the length of a text without reading the text.
PREPARE sizes AS
SELECT c.id, c.token_count, octet_length(c.text_content) AS text_bytes, d.file_description, :protected
FROM document_chunks c
JOIN documents d ON d.id = c.document_id
WHERE c.id = ANY ($1::uuid[]);

-- name: passages
-- The texts, only of selected chunks. Metadata: the document's, overridden by the chunk's; every value is a string.
PREPARE passages AS
SELECT c.id, c.document_id, c.text_content, c.token_count, c.page, c.section, c.chunk_position,
       c.coordinates::text AS coordinates,
       d.title, d.source_url, d.file_description,
       (SELECT jsonb_object_agg(m.key, public.anabranch_metadata_text(m.value))::text
        FROM jsonb_each(public.anabranch_merged_metadata(d.metadata, c.metadata)) m) AS metadata,
       COALESCE(jsonb_typeof(d.metadata), 'null') NOT IN ('object', 'null')
       OR COALESCE(jsonb_typeof(c.metadata), 'null') NOT IN ('object', 'null') AS metadata_invalid,
       :protected
FROM document_chunks c
JOIN documents d ON d.id = c.document_id
WHERE c.id = ANY ($1::uuid[]);

-- name: probe
-- A ping of the tables that searches read: it blocks if one of them is locked. LIMIT 0 reads no rows.
PREPARE probe AS
SELECT FROM document_chunks, documents, chunk_topics, chunk_metadata, access_sets LIMIT 0;
