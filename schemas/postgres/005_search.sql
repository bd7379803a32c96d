-- Searches. A worker makes one call for each arm of a query. A call sets the requesting principals and all settings for its
-- own transaction, so it works with a pooler in transaction mode, and nothing remains on the connection.
--
-- The functions run with the caller's rights: row-level security decides which rows they see. They are STABLE, so all
-- statements of a call use one snapshot. They are written in PL/pgSQL because PostgreSQL plans all statements of an SQL
-- function before the first one runs, and would ignore settings made inside.
--
-- The settings in the head of each function that workers call also hold for the functions that it calls:
-- - A statement whose best plan does not depend on the values is planned once per session (force_generic_plan). Which plan
--   is best for a filtered scope depends on the filters, so these statements are planned on each call (EXECUTE).
-- - Hash joins, merge joins, parallel workers and JIT have to finish, or take longer to start than most searches take,
--   before the first row. Costs are those of data in memory.
-- - Sequential scans and sorts are a last resort. A plan made while the tables were empty would use them; and the only plan
--   without a sort for the nearest rows is the vector index, so statistics cannot change which rows it finds.

-- Fails unless row-level security is active for the caller on all tables that searches use. Called after the tables were
-- read: their locks, held until the end of the transaction, prevent a change in between.
CREATE OR REPLACE FUNCTION public.anabranch_require_row_security() RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
  IF NOT (row_security_active('public.document_chunks'::regclass::oid)
          AND row_security_active('public.documents'::regclass::oid)
          AND row_security_active('public.chunk_topics'::regclass::oid)
          AND row_security_active('public.chunk_metadata'::regclass::oid)
          AND row_security_active('public.access_sets'::regclass::oid)) THEN
    RAISE EXCEPTION 'row-level security is not active for role % on every table', current_user
      USING ERRCODE = 'AB001', HINT = 'Run anabranch check.';
  END IF;
END
$$;

-- The name of the setting for the requesting principals. psql replaces no variables between dollar signs.
CREATE OR REPLACE FUNCTION public.anabranch_principals_setting() RETURNS text
LANGUAGE sql IMMUTABLE RETURN :'principals_setting'::text;

-- Sets the requesting principals, a JSON array, and the time limit of each wait for a lock, until the end of the
-- transaction. No function here has a parameter with a default: PostgreSQL would prefer another function without it.
CREATE OR REPLACE FUNCTION public.anabranch_set_principals(principals text, milliseconds integer) RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  applied text;
BEGIN
  applied := set_config(public.anabranch_principals_setting(), principals, true);
  applied := set_config('lock_timeout', greatest(milliseconds, 1)::text, true);
END
$$;

-- The conditions on metadata as arrays, in their order; null if there are none. `by_metadata` is an array of objects:
--   {"key": …, "values": […]}             the value is one of these
--   {"key": …, "element": …}              the value is an array with this element
--   {"key": …, "numbers": [low, high]}    the value is a number in this range, which includes both; null: no bound
--   {"key": …, "instants": [low, high]}   the value is a date or a date and time in this range
-- Values and elements are compared in the form of anabranch_metadata_text.
--
-- A chunk meets condition n if a row of chunk_metadata has one of the entries from ends[n - 1] + 1 to ends[n], a number
-- from numbers[2n - 1] to numbers[2n], and an instant from instants[2n - 1] to instants[2n], where these are not null.
CREATE OR REPLACE FUNCTION public.anabranch_conditions(
  by_metadata jsonb, OUT ends integer[], OUT entries uuid[], OUT numbers double precision[],
  OUT instants timestamp with time zone[])
RETURNS record
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  condition jsonb;
  text_value text;
  low double precision;
  high double precision;
  first timestamptz;
  last timestamptz;
BEGIN
  FOR condition IN SELECT c.value FROM jsonb_array_elements(by_metadata) c LOOP
    low := NULL;
    high := NULL;
    first := NULL;
    last := NULL;
    IF condition ? 'values' THEN
      FOR text_value IN SELECT v.value FROM jsonb_array_elements_text(condition -> 'values') v LOOP
        entries := array_append(entries, public.anabranch_metadata_entry(condition ->> 'key', text_value));
      END LOOP;
    ELSIF condition ? 'element' THEN
      entries := array_append(entries, public.anabranch_element_entry(condition ->> 'key', condition ->> 'element'));
    ELSE
      entries := array_append(entries, public.anabranch_range_entry(condition ->> 'key'));
      IF condition ? 'numbers' THEN
        low := coalesce(condition #>> '{numbers,0}', '-Infinity');
        high := coalesce(condition #>> '{numbers,1}', 'Infinity');
      ELSE
        first := coalesce(condition #>> '{instants,0}', '-infinity');
        last := coalesce(condition #>> '{instants,1}', 'infinity');
      END IF;
    END IF;
    ends := array_append(ends, cardinality(entries));
    numbers := array_append(array_append(numbers, low), high);
    instants := array_append(array_append(instants, first), last);
  END LOOP;
END
$$;

-- The number of conditions on metadata that are written out in a statement. More would take longer to plan.
CREATE OR REPLACE FUNCTION public.anabranch_written_conditions() RETURNS integer
LANGUAGE sql IMMUTABLE
AS $$
  SELECT 3
$$;

-- Parts of statements. Their parameters:
-- $1 number of rows · $2 session · $3 topic · $4 section · $5 document type · $6 source URL prefix
-- $7 ends · $8 entries · $9 numbers · $10 instants · $11 query · $12 query in half precision

-- One condition on metadata, for a row of chunk_metadata.
CREATE OR REPLACE FUNCTION public.anabranch_condition(
  alias text, number integer, ends integer[], numbers double precision[], instants timestamp with time zone[]) RETURNS text
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  start integer := coalesce(ends[number - 1], 0) + 1;
BEGIN
  RETURN alias
    || CASE WHEN ends[number] = start THEN format('.entry = $8[%s]', start)
            ELSE format('.entry = ANY ($8[%s:%s])', start, ends[number]) END
    || CASE WHEN numbers[2 * number] IS NOT NULL
            THEN format(' AND %s.number BETWEEN $9[%s] AND $9[%s]', alias, 2 * number - 1, 2 * number) ELSE '' END
    || CASE WHEN instants[2 * number] IS NOT NULL
            THEN format(' AND %s.instant BETWEEN $10[%s] AND $10[%s]', alias, 2 * number - 1, 2 * number) ELSE '' END;
END
$$;

-- The conditions on metadata that are not written out, for the chunk c. Entries are joined, because the policies allow an
-- index only for conditions that are known not to leak, and a part of an array is not.
CREATE OR REPLACE FUNCTION public.anabranch_further_conditions() RETURNS text
LANGUAGE sql IMMUTABLE
AS $$
  SELECT 'NOT EXISTS ('
    'SELECT FROM pg_catalog.generate_series(1 + public.anabranch_written_conditions(), pg_catalog.cardinality($7)) n'
    ' WHERE NOT EXISTS (SELECT FROM pg_catalog.unnest($8[coalesce($7[n - 1], 0) + 1 : $7[n]]) e (entry)'
    ' JOIN public.chunk_metadata m ON m.entry = e.entry AND m.chunk_id = c.id'
    ' WHERE ($9[2 * n] IS NULL OR m.number BETWEEN $9[2 * n - 1] AND $9[2 * n])'
    ' AND ($10[2 * n] IS NULL OR m.instant BETWEEN $10[2 * n - 1] AND $10[2 * n]) OFFSET 0) OFFSET 0)'
$$;

-- The scope of a filtered search.
--
-- Written for the ordinary indexes: the topic's chunks come from a table keyed by topic, and chunks that meet a condition on
-- metadata from a table keyed by entry. The planner can start with the rarest of the conditions that are written out.
CREATE OR REPLACE FUNCTION public.anabranch_filtered_scope(
  session uuid, topic uuid, by_section text, by_type text, by_prefix text,
  ends integer[], numbers double precision[], instants timestamp with time zone[]) RETURNS text
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  conditions integer := coalesce(cardinality(ends), 0);
  written integer := least(conditions, public.anabranch_written_conditions());
  of_document boolean := by_type IS NOT NULL OR by_prefix IS NOT NULL;
  joined text := '';
BEGIN
  FOR n IN 1..written LOOP
    joined := joined || format(' JOIN public.chunk_metadata m%1$s ON m%1$s.chunk_id = c.id AND ', n)
      || public.anabranch_condition('m' || n, n, ends, numbers, instants);
  END LOOP;
  RETURN ' FROM public.document_chunks c'
    || CASE WHEN of_document THEN ' LEFT JOIN public.documents d ON d.id = c.document_id' ELSE '' END
    || CASE WHEN topic IS NOT NULL
            THEN ' JOIN public.chunk_topics t ON t.topic_id = $3 AND t.session_id = $2 AND t.chunk_id = c.id' ELSE '' END
    || joined
    || ' WHERE c.embedding IS NOT NULL'
    || CASE WHEN session IS NOT NULL THEN ' AND c.session_id = $2' ELSE '' END
    || CASE WHEN by_section IS NOT NULL THEN ' AND c.section OPERATOR(pg_catalog.=) $4' ELSE '' END
    || CASE WHEN by_type IS NOT NULL THEN ' AND d.document_type OPERATOR(pg_catalog.=) $5' ELSE '' END
    || CASE WHEN by_prefix IS NOT NULL THEN ' AND d.source_url OPERATOR(pg_catalog.^@) $6' ELSE '' END
    -- Only for chunks that meet all others: it takes longer.
    || CASE WHEN conditions > written
            THEN format(' AND CASE WHEN m%s.chunk_id IS NOT NULL THEN ', written)
                 || public.anabranch_further_conditions() || ' END' ELSE '' END
    -- No index supports the policies. So without a session, their condition is repeated for the documents if these are
    -- filtered, because they are fewer.
    || CASE WHEN session IS NULL AND of_document
            THEN ' AND d.access_set_id = ANY (ARRAY(SELECT a.id FROM public.access_sets a))' ELSE '' END;
END
$$;

-- The number of searchable rows in a scope, counted up to most; without filters in indexes only. Chunks without an embedding
-- count too if a topic or one condition on metadata is the only condition. `scope`: of a filtered search.
CREATE OR REPLACE FUNCTION public.anabranch_scope_size(
  scope text, session uuid, topic uuid, by_section text, by_type text, by_prefix text,
  ends integer[], entries uuid[], numbers double precision[], instants timestamp with time zone[], most integer)
RETURNS integer
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  size integer;
BEGIN
  IF scope IS NOT NULL THEN
    IF session IS NULL AND by_section IS NULL AND by_type IS NULL AND by_prefix IS NULL AND cardinality(ends) = 1 THEN
      scope := ' FROM public.chunk_metadata m WHERE ' || public.anabranch_condition('m', 1, ends, numbers, instants);
    END IF;
    EXECUTE 'SELECT count(*) FROM (SELECT' || scope || ' LIMIT $1) s'
    INTO size USING most, session, topic, by_section, by_type, by_prefix, ends, entries, numbers, instants;
  ELSIF topic IS NOT NULL THEN
    SELECT count(*) INTO size
    FROM (SELECT FROM public.chunk_topics t WHERE t.topic_id = topic AND t.session_id = session LIMIT most) s;
  ELSIF session IS NOT NULL THEN
    SELECT count(*) INTO size
    FROM (SELECT FROM public.document_chunks c WHERE c.session_id = session AND c.embedding IS NOT NULL LIMIT most) s;
  ELSE
    -- No index supports the policies, so their condition is repeated.
    SELECT count(*) INTO size
    FROM (SELECT FROM public.document_chunks c
          WHERE c.access_set_id = ANY (ARRAY(SELECT a.id FROM public.access_sets a)) AND c.embedding IS NOT NULL
          LIMIT most) s;
  END IF;
  RETURN size;
END
$$;

-- The nearest rows of a scope, exactly: reads all of them. A zero vector has no distance (NaN), and is left out, as by the
-- vector index. `parents`: of problems, else null.
CREATE OR REPLACE FUNCTION public.anabranch_search_exactly(
  scope text, query :vector_schema.vector, session uuid, topic uuid, by_section text, by_type text, by_prefix text,
  ends integer[], entries uuid[], numbers double precision[], instants timestamp with time zone[], max_rows integer,
  OUT ids uuid[], OUT distances double precision[], OUT parents uuid[]) RETURNS record
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, :vector_schema, pg_temp
AS $$
BEGIN
  IF scope IS NOT NULL THEN
    EXECUTE 'SELECT pg_catalog.array_agg(n.id), pg_catalog.array_agg(n.distance), pg_catalog.array_agg(n.parent_id)'
            ' FROM (SELECT * FROM (SELECT c.id, c.embedding <=> $11 AS distance,'
            ' CASE WHEN c.chunk_type OPERATOR(pg_catalog.=) ''problem'' THEN c.parent_chunk_id END AS parent_id'
            || scope || ' OFFSET 0) s WHERE s.distance < ''NaN'' ORDER BY s.distance, s.id LIMIT $1) n'
    INTO ids, distances, parents
    USING max_rows, session, topic, by_section, by_type, by_prefix, ends, entries, numbers, instants, query;
  ELSIF topic IS NOT NULL THEN
    SELECT pg_catalog.array_agg(n.id), pg_catalog.array_agg(n.distance), pg_catalog.array_agg(n.parent_id) INTO ids, distances, parents
    FROM (SELECT *
          FROM (SELECT c.id, c.embedding <=> query AS distance,
                       CASE WHEN c.chunk_type OPERATOR(pg_catalog.=) 'problem' THEN c.parent_chunk_id END AS parent_id
                FROM public.chunk_topics t
                JOIN public.document_chunks c ON c.id = t.chunk_id
                WHERE t.topic_id = topic AND t.session_id = session
                  AND c.session_id = session AND c.embedding IS NOT NULL
                OFFSET 0) s -- an optimization fence: the vector index must not provide this order
          WHERE s.distance < 'NaN'
          ORDER BY s.distance, s.id
          LIMIT max_rows) n;
  ELSIF session IS NOT NULL THEN
    SELECT pg_catalog.array_agg(n.id), pg_catalog.array_agg(n.distance), pg_catalog.array_agg(n.parent_id) INTO ids, distances, parents
    FROM (SELECT *
          FROM (SELECT c.id, c.embedding <=> query AS distance,
                       CASE WHEN c.chunk_type OPERATOR(pg_catalog.=) 'problem' THEN c.parent_chunk_id END AS parent_id
                FROM public.document_chunks c
                WHERE c.session_id = session AND c.embedding IS NOT NULL
                OFFSET 0) s
          WHERE s.distance < 'NaN'
          ORDER BY s.distance, s.id
          LIMIT max_rows) n;
  ELSE
    SELECT pg_catalog.array_agg(n.id), pg_catalog.array_agg(n.distance), pg_catalog.array_agg(n.parent_id) INTO ids, distances, parents
    FROM (SELECT *
          FROM (SELECT c.id, c.embedding <=> query AS distance,
                       CASE WHEN c.chunk_type OPERATOR(pg_catalog.=) 'problem' THEN c.parent_chunk_id END AS parent_id
                FROM public.document_chunks c
                WHERE c.access_set_id = ANY (ARRAY(SELECT a.id FROM public.access_sets a)) AND c.embedding IS NOT NULL
                OFFSET 0) s
          WHERE s.distance < 'NaN'
          ORDER BY s.distance, s.id
          LIMIT max_rows) n;
  END IF;
END
$$;

-- The nearest rows of a scope that the vector index finds; `size`: how many, at least wanted if it finds enough. The
-- conditions filter row by row: OFFSET 0 keeps those on other tables from becoming joins, which may have another order. The
-- distances are those of the full vectors. Equally near rows are found all or none: with WITH TIES, because
-- `ORDER BY …, c.id` would keep PostgreSQL 16 from using the vector index.
CREATE OR REPLACE FUNCTION public.anabranch_search_index(
  by_halfvec boolean, query :vector_schema.vector, session uuid, topic uuid, by_section text, by_type text, by_prefix text,
  ends integer[], entries uuid[], numbers double precision[], instants timestamp with time zone[], wanted integer,
  OUT ids uuid[], OUT distances double precision[], OUT parents uuid[], OUT size integer) RETURNS record
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, :vector_schema, pg_temp
AS $$
DECLARE
  conditions integer := coalesce(pg_catalog.cardinality(ends), 0);
  written integer := least(conditions, public.anabranch_written_conditions());
  half halfvec := query;
  filters text := '';
BEGIN
  IF by_section IS NOT NULL THEN
    filters := filters || ' AND c.section OPERATOR(pg_catalog.=) $4';
  END IF;
  IF by_type IS NOT NULL OR by_prefix IS NOT NULL THEN
    filters := filters || ' AND EXISTS (SELECT FROM public.documents d WHERE d.id = c.document_id'
      || CASE WHEN by_type IS NOT NULL THEN ' AND d.document_type OPERATOR(pg_catalog.=) $5' ELSE '' END
      || CASE WHEN by_prefix IS NOT NULL THEN ' AND d.source_url OPERATOR(pg_catalog.^@) $6' ELSE '' END
      || ' OFFSET 0)';
  END IF;
  FOR n IN 1..written LOOP
    filters := filters || ' AND EXISTS (SELECT FROM public.chunk_metadata m WHERE m.chunk_id = c.id AND '
      || public.anabranch_condition('m', n, ends, numbers, instants) || ' OFFSET 0)';
  END LOOP;
  IF conditions > written THEN
    filters := filters || ' AND ' || public.anabranch_further_conditions();
  END IF;

  IF filters <> '' THEN
    EXECUTE 'SELECT pg_catalog.array_agg(n.id ORDER BY n.distance, n.id), pg_catalog.array_agg(n.distance ORDER BY n.distance, n.id),'
            ' pg_catalog.array_agg(n.parent_id ORDER BY n.distance, n.id), pg_catalog.count(*)'
            ' FROM (SELECT c.id, c.embedding <=> $11 AS distance,'
            ' CASE WHEN c.chunk_type OPERATOR(pg_catalog.=) ''problem'' THEN c.parent_chunk_id END AS parent_id'
            ' FROM public.document_chunks c WHERE c.embedding IS NOT NULL'
            || CASE WHEN session IS NOT NULL THEN ' AND c.session_id = $2' ELSE '' END
            || CASE WHEN topic IS NOT NULL THEN ' AND $3 = ANY (c.related_topic_ids)' ELSE '' END
            || filters || ' ORDER BY '
            || CASE WHEN by_halfvec THEN '(l2_normalize(c.embedding)::halfvec(768)) <=> $12' ELSE 'c.embedding <=> $11' END
            || ' FETCH FIRST $1 ROWS WITH TIES) n'
    INTO ids, distances, parents, size
    USING wanted, session, topic, by_section, by_type, by_prefix, ends, entries, numbers, instants, query, half;
  ELSIF by_halfvec THEN
    SELECT pg_catalog.array_agg(n.id ORDER BY n.distance, n.id), pg_catalog.array_agg(n.distance ORDER BY n.distance, n.id),
           pg_catalog.array_agg(n.parent_id ORDER BY n.distance, n.id), count(*)
    INTO ids, distances, parents, size
    FROM (SELECT c.id, c.embedding <=> query AS distance,
                 CASE WHEN c.chunk_type OPERATOR(pg_catalog.=) 'problem' THEN c.parent_chunk_id END AS parent_id
          FROM public.document_chunks c
          WHERE c.embedding IS NOT NULL
            AND (session IS NULL OR c.session_id = session)
            AND (topic IS NULL OR topic = ANY (c.related_topic_ids))
          ORDER BY (l2_normalize(c.embedding)::halfvec(768)) <=> half
          FETCH FIRST wanted ROWS WITH TIES) n;
  ELSE
    SELECT pg_catalog.array_agg(n.id ORDER BY n.distance, n.id), pg_catalog.array_agg(n.distance ORDER BY n.distance, n.id),
           pg_catalog.array_agg(n.parent_id ORDER BY n.distance, n.id), count(*)
    INTO ids, distances, parents, size
    FROM (SELECT c.id, c.embedding <=> query AS distance,
                 CASE WHEN c.chunk_type OPERATOR(pg_catalog.=) 'problem' THEN c.parent_chunk_id END AS parent_id
          FROM public.document_chunks c
          WHERE c.embedding IS NOT NULL
            AND (session IS NULL OR c.session_id = session)
            AND (topic IS NULL OR topic = ANY (c.related_topic_ids))
          ORDER BY c.embedding <=> query
          FETCH FIRST wanted ROWS WITH TIES) n;
  END IF;
END
$$;

-- The nearest chunks of one scope.
--
-- principals                the requesting principals, as a JSON array
-- query                     unit length
-- session, topic            the scope; null: everything that the principals may read; a topic needs a session
-- by_section … by_metadata  filters, ANDed; null: no filter; by_metadata: see anabranch_conditions
-- max_rows                  number of rows to return
-- expand_parents            whether to look up the parents that replace problems
-- small_scope, exact_scope  scopes of at most this many rows are searched exactly: always; if the index finds too few rows
-- by_halfvec, ef_search     the vector index's expression (null: do not use the index); the size of its candidate list
-- milliseconds              time limit, checked between statements, and of each wait for a lock
--
-- Returns ids and cosine distances in the total order (distance, id). With expand_parents also, for each, the parent that
-- replaces it, and whether that parent is missing. `complete`: the scope has no more rows. `truncated`: see step 6. `exact`:
-- all rows of the scope were compared.
--
-- Steps, until one has a result:
-- 1. An exact search, if the scope has at most small_scope rows, or five times as many in a session without topic and
--    filters: no other table is read, and most sessions are a small part of the store, so step 2 would cost more.
-- 2. The vector index, up to 1,000 of its tuples. It has to find eight times max_rows, but at most 120 more: if it starts in
--    the wrong region, the nearest rows are not among the first. (Four times found 0.73 of them for some queries, while half
--    of the chunks were in the scope, but not the nearest.)
-- 3. An exact search, if the scope has at most exact_scope / 4 rows: the index found few rows, so it is a small part of the
--    store or far from the query, where the index misses most. Or if it has at most exact_scope rows and reading them costs no
--    more than to continue with the index. Step 2 shows how many tuples the index would have to visit: few found, many to
--    visit. One of them costs as much as three rows, or one row of a topic or a filtered scope, which is found through other
--    tables.
-- 4. The vector index, up to the server's hnsw.max_scan_tuples.
-- 5. An exact search, if the scope has at most exact_scope rows.
-- 6. The rows of step 4: truncated.
-- If by_halfvec is null, only step 1: a larger scope returns no rows, truncated.
CREATE OR REPLACE FUNCTION public.anabranch_search(
  principals text, query :vector_schema.vector, session uuid, topic uuid,
  by_section text, by_type text, by_prefix text, by_metadata jsonb, max_rows integer, expand_parents boolean,
  small_scope integer, exact_scope integer, by_halfvec boolean, ef_search integer, milliseconds integer,
  OUT ids uuid[], OUT distances double precision[], OUT parent_ids uuid[], OUT parents_missing boolean[],
  OUT complete boolean, OUT truncated boolean, OUT exact boolean) RETURNS record
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
SET plan_cache_mode = force_generic_plan SET jit = off SET random_page_cost = 1
SET enable_seqscan = off SET enable_sort = off SET enable_hashjoin = off SET enable_mergejoin = off
SET max_parallel_workers_per_gather = 0
AS $$
DECLARE
  deadline timestamptz := clock_timestamp() + make_interval(secs => milliseconds / 1000.0);
  wanted integer := least(8 * max_rows, max_rows + 120);
  first_tuples integer := 1000;
  rows_per_tuple integer;
  max_tuples integer := current_setting('hnsw.max_scan_tuples');
  scope text;
  bound integer;
  counted integer := -1; -- the bound up to which the scope was counted
  size integer;
  parents uuid[];
  ends integer[];
  entries uuid[];
  numbers double precision[];
  instants timestamptz[];
  applied text;
BEGIN
  PERFORM public.anabranch_set_principals(principals, milliseconds);
  applied := set_config('hnsw.ef_search', least(greatest(ef_search, wanted), 1000)::text, true);
  -- After the first candidates, strict_order discards rows that it finds out of order. Fetching more rows in relaxed order
  -- and sorting them misses fewer.
  applied := set_config('hnsw.iterative_scan', 'relaxed_order', true);
  IF by_metadata IS NOT NULL THEN
    SELECT c.ends, c.entries, c.numbers, c.instants INTO ends, entries, numbers, instants
    FROM public.anabranch_conditions(by_metadata) c;
  END IF;
  IF by_section IS NOT NULL OR by_type IS NOT NULL OR by_prefix IS NOT NULL OR ends IS NOT NULL THEN
    scope := public.anabranch_filtered_scope(session, topic, by_section, by_type, by_prefix, ends, numbers, instants);
  END IF;
  rows_per_tuple := CASE WHEN topic IS NULL AND scope IS NULL THEN 3 ELSE 1 END;
  complete := false;
  truncated := false;
  exact := false;

  FOR attempt IN 1..3 LOOP
    IF clock_timestamp() > deadline THEN
      RAISE EXCEPTION 'the search took longer than its time limit' USING ERRCODE = 'query_canceled';
    END IF;
    bound := CASE
      WHEN attempt = 1 AND session IS NOT NULL AND topic IS NULL AND scope IS NULL THEN least(5 * small_scope, exact_scope)
      WHEN attempt = 1 THEN small_scope
      -- size: what the first scan found
      WHEN attempt = 2 THEN least(exact_scope, greatest(
        exact_scope / 4, rows_per_tuple * least(max_tuples, first_tuples * wanted / greatest(size, 1))))
      ELSE exact_scope
    END;
    IF bound > counted THEN
      size := public.anabranch_scope_size(
        scope, session, topic, by_section, by_type, by_prefix, ends, entries, numbers, instants, bound + 1);
      counted := bound;
    ELSE
      size := bound + 1; -- it has more rows than were counted
    END IF;
    IF size <= bound THEN
      SELECT e.ids, e.distances, e.parents INTO ids, distances, parents
      FROM public.anabranch_search_exactly(
        scope, query, session, topic, by_section, by_type, by_prefix, ends, entries, numbers, instants, max_rows) e;
      complete := size <= max_rows OR ids IS NULL OR cardinality(ids) < max_rows;
      exact := true;
      EXIT;
    END IF;
    IF attempt = 3 OR by_halfvec IS NULL THEN
      truncated := true;
      EXIT;
    END IF;
    IF attempt = 1 THEN
      applied := set_config('hnsw.max_scan_tuples', least(max_tuples, first_tuples)::text, true);
    END IF;
    SELECT i.ids[:max_rows], i.distances[:max_rows], i.parents[:max_rows], i.size INTO ids, distances, parents, size
    FROM public.anabranch_search_index(
      by_halfvec, query, session, topic, by_section, by_type, by_prefix, ends, entries, numbers, instants, wanted) i;
    applied := set_config('hnsw.max_scan_tuples', max_tuples::text, true);
    EXIT WHEN size >= wanted;
  END LOOP;

  -- A parent replaces a problem only if it also matches the event's session and filters (and is readable, by the policies).
  -- It need not match the topic: the session is the event's scope, and a parent may lack its children's topics.
  IF expand_parents AND array_remove(parents, NULL) <> '{}' THEN
    SELECT array_agg(p.id ORDER BY w.number), array_agg(w.id IS NOT NULL AND p.id IS NULL ORDER BY w.number)
    INTO parent_ids, parents_missing
    FROM unnest(parents) WITH ORDINALITY w (id, number)
    LEFT JOIN LATERAL (
      SELECT c.id
      FROM public.document_chunks c
      LEFT JOIN public.documents d ON d.id = c.document_id
      WHERE c.id = w.id
        AND (session IS NULL OR c.session_id = session)
        AND (by_section IS NULL OR c.section OPERATOR(pg_catalog.=) by_section)
        AND (by_type IS NULL OR d.document_type OPERATOR(pg_catalog.=) by_type)
        AND (by_prefix IS NULL OR d.source_url OPERATOR(pg_catalog.^@) by_prefix)
        AND (ends IS NULL OR NOT EXISTS (
          SELECT FROM generate_series(1, cardinality(ends)) n
          WHERE NOT EXISTS (
            SELECT FROM public.chunk_metadata m
            WHERE m.chunk_id = c.id
              AND m.entry = ANY (entries[coalesce(ends[n - 1], 0) + 1 : ends[n]])
              AND (numbers[2 * n] IS NULL OR m.number BETWEEN numbers[2 * n - 1] AND numbers[2 * n])
              AND (instants[2 * n] IS NULL OR m.instant BETWEEN instants[2 * n - 1] AND instants[2 * n])
            OFFSET 0)
          OFFSET 0))
      OFFSET 0 -- an optimization fence: both rows are found by their keys
    ) p ON true;
  END IF;
  PERFORM public.anabranch_require_row_security();
END
$$;

-- The content of chunks that the principals may read. Metadata: the document's, overridden by the chunk's; every value is a
-- string.
CREATE OR REPLACE FUNCTION public.anabranch_passages(principals text, ids uuid[], milliseconds integer)
RETURNS TABLE (
  id uuid, document_id uuid, text_content text, token_count integer, page integer, section text, chunk_position integer,
  coordinates text, title text, source_url text, file_description text, metadata text, metadata_invalid boolean)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
SET plan_cache_mode = force_generic_plan SET jit = off SET random_page_cost = 1
SET enable_seqscan = off SET enable_sort = off SET enable_hashjoin = off SET enable_mergejoin = off
SET max_parallel_workers_per_gather = 0
AS $$
BEGIN
  PERFORM public.anabranch_set_principals(principals, milliseconds);
  RETURN QUERY
  SELECT c.id, c.document_id, c.text_content::text, c.token_count::int, c.page::int, c.section::text,
         c.chunk_position::int, c.coordinates::text, d.title::text, d.source_url::text, d.file_description::text,
         (SELECT jsonb_object_agg(m.key, public.anabranch_metadata_text(m.value))::text
          FROM jsonb_each(public.anabranch_merged_metadata(d.metadata, c.metadata)) m),
         coalesce(jsonb_typeof(d.metadata), 'null') NOT IN ('object', 'null')
         OR coalesce(jsonb_typeof(c.metadata), 'null') NOT IN ('object', 'null')
  FROM public.document_chunks c
  JOIN public.documents d ON d.id = c.document_id
  WHERE c.id = ANY (ids);
  PERFORM public.anabranch_require_row_security();
END
$$;

-- The sizes of chunks that the principals may read, without reading their texts: for candidates that a token budget may skip.
CREATE OR REPLACE FUNCTION public.anabranch_sizes(principals text, ids uuid[], milliseconds integer)
RETURNS TABLE (id uuid, token_count integer, text_bytes integer, file_description text)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
SET plan_cache_mode = force_generic_plan SET jit = off SET random_page_cost = 1
SET enable_seqscan = off SET enable_sort = off SET enable_hashjoin = off SET enable_mergejoin = off
SET max_parallel_workers_per_gather = 0
AS $$
BEGIN
  PERFORM public.anabranch_set_principals(principals, milliseconds);
  RETURN QUERY
  SELECT c.id, c.token_count::int, octet_length(c.text_content), d.file_description::text
  FROM public.document_chunks c
  JOIN public.documents d ON d.id = c.document_id
  WHERE c.id = ANY (ids);
  PERFORM public.anabranch_require_row_security();
END
$$;

-- A search and the content of its rows, in one call: for selections that are known in advance to be the nearest rows. One
-- row for each chunk, with its content; if there is none, one row with a null id.
CREATE OR REPLACE FUNCTION public.anabranch_search_passages(
  principals text, query :vector_schema.vector, session uuid, topic uuid,
  by_section text, by_type text, by_prefix text, by_metadata jsonb, max_rows integer,
  small_scope integer, exact_scope integer, by_halfvec boolean, ef_search integer, milliseconds integer)
RETURNS TABLE (
  complete boolean, truncated boolean, exact boolean, distance double precision,
  id uuid, document_id uuid, text_content text, token_count integer, page integer, section text, chunk_position integer,
  coordinates text, title text, source_url text, file_description text, metadata text, metadata_invalid boolean)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  arm record;
BEGIN
  SELECT * INTO arm
  FROM public.anabranch_search(
    principals, query, session, topic, by_section, by_type, by_prefix, by_metadata, max_rows, false,
    small_scope, exact_scope, by_halfvec, ef_search, milliseconds);
  RETURN QUERY
  SELECT arm.complete, arm.truncated, arm.exact, arm.distances[array_position(arm.ids, p.id)], p.*
  FROM public.anabranch_passages(principals, arm.ids, milliseconds) p;
  IF NOT FOUND THEN
    complete := arm.complete;
    truncated := arm.truncated;
    exact := arm.exact;
    RETURN NEXT;
  END IF;
END
$$;

REVOKE ALL ON FUNCTION
  public.anabranch_search(
    text, :vector_schema.vector, uuid, uuid, text, text, text, jsonb, int, boolean, int, int, boolean, int, int),
  public.anabranch_search_passages(
    text, :vector_schema.vector, uuid, uuid, text, text, text, jsonb, int, int, int, boolean, int, int),
  public.anabranch_passages(text, uuid[], int), public.anabranch_sizes(text, uuid[], int),
  public.anabranch_search_exactly(
    text, :vector_schema.vector, uuid, uuid, text, text, text, int[], uuid[], double precision[],
    timestamp with time zone[], int),
  public.anabranch_search_index(
    boolean, :vector_schema.vector, uuid, uuid, text, text, text, int[], uuid[], double precision[],
    timestamp with time zone[], int),
  public.anabranch_scope_size(
    text, uuid, uuid, text, text, text, int[], uuid[], double precision[], timestamp with time zone[], int),
  public.anabranch_filtered_scope(
    uuid, uuid, text, text, text, int[], double precision[], timestamp with time zone[]),
  public.anabranch_conditions(jsonb), public.anabranch_written_conditions(),
  public.anabranch_condition(text, int, int[], double precision[], timestamp with time zone[]),
  public.anabranch_further_conditions(),
  public.anabranch_set_principals(text, int), public.anabranch_principals_setting(), public.anabranch_require_row_security()
  FROM PUBLIC;
