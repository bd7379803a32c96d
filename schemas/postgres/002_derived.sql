-- Derived data that makes searches with row-level security fast: from document_grants, so that a row is checked by
-- comparing one number instead of looking up grants; from arrays and JSON, so that an index can be used.
--
-- Each distinct set of readers is stored once (`access_sets`); a document and its chunks store the id of their set.
-- Only these triggers set it: any other value is replaced by the correct one. A chunk's topics, and its metadata merged
-- with its document's, are also stored in separate tables.
--
-- Why this is correct under concurrency, with or without foreign keys between the tables:
-- 1. Data derived for a document is computed after the change, in a separate statement (so with a new snapshot), under
--    a lock on the document that is held until the transaction ends. So if two transactions change the same document's
--    grants, chunks or existence, the later one reads what the earlier one wrote.
-- 2. The lock is on the document's row: FOR NO KEY UPDATE to change its access set or metadata, FOR SHARE to copy them
--    into a chunk. A BEFORE trigger may compute only under that lock. An insert that waits for a concurrent delete of
--    the same id has no row to lock yet, so its access set is computed in the AFTER trigger.
-- 3. A grant or a chunk whose document is not visible may belong to one that is being inserted. So it locks the id
--    instead: a row of `access_locks`, exclusively. An insert of a document shares that lock before deriving data.
-- 4. In REPEATABLE READ and SERIALIZABLE, one snapshot is used for the whole transaction. Writes that would derive data
--    from an outdated snapshot fail: with a serialization failure if a lock detects it, else with feature_not_supported.
-- Sets are looked up and deleted with SKIP LOCKED, so no transaction waits for another one's set. As a consequence, a
-- set may be stored twice, which is harmless.
--
-- The functions run as the tables' owner. Their search_path finds functions and operators only in pg_catalog. Functions
-- without a search_path of their own qualify everything instead: PostgreSQL can then inline them into the calling
-- statement, so they cost no more than the expression. Trigger conditions are resolved when the trigger is created:
-- operators for which another schema could have a closer match (those on arrays) are qualified.

CREATE TABLE IF NOT EXISTS public.access_sets (
  id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  -- sorted, without duplicates
  principals text[] NOT NULL,
  -- the lookup key: a btree on the array itself would reject long arrays
  digest bytea NOT NULL
);

-- Null: nobody may read the document. The foreign key prevents deleting a set that is in use.
ALTER TABLE public.documents ADD COLUMN IF NOT EXISTS access_set_id bigint REFERENCES public.access_sets;

-- No foreign key: the value always equals the document's, which has one.
ALTER TABLE public.document_chunks ADD COLUMN IF NOT EXISTS access_set_id bigint;

-- The topics of each chunk, keyed by topic: with row-level security, a GIN index on related_topic_ids is not used,
-- because `@>` is not leakproof. No foreign key to the chunks: TRUNCATE document_chunks would then require CASCADE.
CREATE TABLE IF NOT EXISTS public.chunk_topics (
  topic_id uuid NOT NULL,
  chunk_id uuid NOT NULL,
  session_id uuid,
  access_set_id bigint,
  PRIMARY KEY (topic_id, chunk_id)
);

-- For metadata filters, of a chunk whose metadata overrides its document's: one row for each key and value, one for each
-- different element of an array, and one for each number or date. A GIN index would not be used here either: jsonb's `@>`
-- is not leakproof. Comparing numeric values is not leakproof either, so numbers are double precision.
CREATE TABLE IF NOT EXISTS public.chunk_metadata (
  -- 128 bits of a SHA-256: supports any length, and constructing a collision is infeasible. Of key, zero byte (which JSON
  -- in PostgreSQL cannot contain) and value; of key, two zero bytes and element; or of key and three zero bytes.
  entry uuid NOT NULL,
  chunk_id uuid NOT NULL,
  access_set_id bigint,
  -- One of them in a row for a number or a date, else null.
  number double precision,
  instant timestamptz,
  PRIMARY KEY (entry, chunk_id)
);
-- Stores of version 2 lack them.
ALTER TABLE public.chunk_metadata ADD COLUMN IF NOT EXISTS number double precision;
ALTER TABLE public.chunk_metadata ADD COLUMN IF NOT EXISTS instant timestamptz;

-- Locks on ids of documents that are not visible, by the id's last byte. Rows are created on first use. A table instead
-- of advisory locks, because any login could take those and block every insert.
CREATE TABLE IF NOT EXISTS public.access_locks (
  bucket int PRIMARY KEY
);

-- The schema version is the highest one here. Workers built for a version below oldest_worker cannot use the store.
CREATE TABLE IF NOT EXISTS public.anabranch_schema (
  version int PRIMARY KEY,
  oldest_worker int NOT NULL,
  applied_at timestamptz NOT NULL DEFAULT now()
);

-- For finding and deleting sets; the triggers below need these indexes as soon as there are rows.
CREATE INDEX IF NOT EXISTS access_sets_digest ON public.access_sets USING btree (digest);
CREATE INDEX IF NOT EXISTS documents_access_set_id ON public.documents USING btree (access_set_id);
CREATE INDEX IF NOT EXISTS document_chunks_document_id ON public.document_chunks USING btree (document_id);
CREATE INDEX IF NOT EXISTS chunk_topics_chunk_id ON public.chunk_topics USING btree (chunk_id);
CREATE INDEX IF NOT EXISTS chunk_metadata_chunk_id ON public.chunk_metadata USING btree (chunk_id);

-- Locks

-- Whether this transaction uses one snapshot for all of its statements.
CREATE OR REPLACE FUNCTION public.anabranch_keeps_snapshot() RETURNS boolean
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
  RETURN current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted');
END
$$;

-- Whether a foreign key guarantees that every row of a table has its document: on that very column, valid, enforced, and
-- checked at the end of each statement.
CREATE OR REPLACE FUNCTION public.anabranch_has_document_key(referencing regclass) RETURNS boolean
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
  RETURN EXISTS (SELECT FROM pg_constraint k
                 WHERE k.contype = 'f' AND k.conrelid = referencing AND k.confrelid = 'public.documents'::regclass
                   AND k.conkey = ARRAY(SELECT a.attnum FROM pg_attribute a
                                        WHERE a.attrelid = k.conrelid AND a.attname = 'document_id')
                   AND k.confkey = ARRAY(SELECT a.attnum FROM pg_attribute a
                                         WHERE a.attrelid = k.confrelid AND a.attname = 'id')
                   AND k.convalidated AND NOT k.condeferrable
                   AND NOT EXISTS (SELECT FROM pg_trigger t
                                   WHERE t.tgconstraint = k.oid AND t.tgenabled NOT IN ('O', 'A'))
                   AND to_jsonb(k) ->> 'conenforced' IS DISTINCT FROM 'false'); -- a column of PostgreSQL 18
END
$$;

-- Rejects a write whose effects an outdated snapshot would miss. `keyed`: a foreign key check ignores the snapshot.
CREATE OR REPLACE FUNCTION public.anabranch_require_read_committed(keyed boolean) RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
  IF keyed OR NOT public.anabranch_keeps_snapshot() THEN
    RETURN;
  END IF;
  RAISE EXCEPTION 'grants and metadata of a document can only be written in READ COMMITTED'
    USING ERRCODE = 'feature_not_supported',
          DETAIL = 'Rows committed after this transaction''s snapshot would be missed and keep revoked access.',
          HINT = 'Use BEGIN ISOLATION LEVEL READ COMMITTED.';
END
$$;

-- Locks documents before computing their derived data and, with `and_missing`, the ids of documents that are not visible
-- (rule 3). Updates rows of `access_locks` instead of only locking them, so that a transaction with an older snapshot
-- fails to share the lock (rule 4).
CREATE OR REPLACE FUNCTION public.anabranch_lock_documents(ids uuid[], and_missing boolean) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  visible uuid[];
  missing uuid[];
BEGIN
  -- In a fixed order, so that two bulk loads cannot deadlock.
  SELECT array_agg(locked.id) INTO visible
  FROM (SELECT d.id FROM public.documents d WHERE d.id = ANY (ids) ORDER BY d.id FOR NO KEY UPDATE) locked;
  IF and_missing THEN
    SELECT array_agg(m.id) INTO missing FROM (SELECT unnest(ids) EXCEPT SELECT unnest(visible)) m (id)
    WHERE m.id IS NOT NULL;
  END IF;
  IF missing IS NOT NULL THEN
    INSERT INTO public.access_locks (bucket)
    SELECT DISTINCT get_byte(uuid_send(m.id), 15) FROM unnest(missing) m (id) ORDER BY 1
    ON CONFLICT (bucket) DO UPDATE SET bucket = excluded.bucket;
    -- Documents that were being inserted are now committed.
    PERFORM FROM public.documents d WHERE d.id = ANY (missing) ORDER BY d.id FOR NO KEY UPDATE;
  END IF;
END
$$;

-- The other side of that lock: a document now has this id.
CREATE OR REPLACE FUNCTION public.anabranch_share_id_lock(document uuid) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
  LOOP
    PERFORM FROM public.access_locks l WHERE l.bucket = get_byte(uuid_send(document), 15) FOR SHARE;
    EXIT WHEN FOUND;
    INSERT INTO public.access_locks (bucket) VALUES (get_byte(uuid_send(document), 15)) ON CONFLICT DO NOTHING;
  END LOOP;
END
$$;

-- Access sets

-- The readers of each document that has any: sorted, without duplicates. Inlined like a view, so that a condition on
-- document_id can use the index.
CREATE OR REPLACE FUNCTION public.anabranch_all_readers() RETURNS TABLE (document_id uuid, principals text[])
LANGUAGE sql STABLE PARALLEL SAFE
AS $$
  SELECT g.document_id,
         pg_catalog.array_agg(DISTINCT g.principal::pg_catalog.text COLLATE pg_catalog."C"
                              ORDER BY g.principal::pg_catalog.text COLLATE pg_catalog."C")
  FROM public.document_grants g
  GROUP BY g.document_id
$$;

-- The readers of one document; null if there are none.
CREATE OR REPLACE FUNCTION public.anabranch_readers(document uuid) RETURNS text[]
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
  RETURN (SELECT r.principals FROM public.anabranch_all_readers() r WHERE r.document_id = document);
END
$$;

-- The id of the access set for a document's grants; null if there are none.
CREATE OR REPLACE FUNCTION public.anabranch_access_set(document uuid) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  readers text[];
  fingerprint bytea;
  found_id bigint;
BEGIN
  IF public.anabranch_keeps_snapshot() THEN
    -- Fails if one of them was revoked since the snapshot.
    PERFORM FROM public.document_grants g WHERE g.document_id = document FOR SHARE;
  END IF;
  readers := public.anabranch_readers(document);
  IF readers IS NULL THEN
    RETURN NULL;
  END IF;
  fingerprint := sha256(convert_to(to_jsonb(readers)::text, 'UTF8'));
  -- Locked, so that it cannot be deleted before it is referenced.
  SELECT s.id INTO found_id
  FROM public.access_sets s
  WHERE s.digest = fingerprint AND s.principals = readers
  ORDER BY s.id
  LIMIT 1
  FOR KEY SHARE SKIP LOCKED;
  IF found_id IS NULL THEN
    INSERT INTO public.access_sets (principals, digest) VALUES (readers, fingerprint) RETURNING id INTO found_id;
  END IF;
  RETURN found_id;
END
$$;

-- Deletes a set that no document uses any more, for example an intermediate set when grants are added one by one.
CREATE OR REPLACE FUNCTION public.anabranch_discard_access_set(candidate bigint) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
  -- With an outdated snapshot the check below would be wrong; `anabranch_rebuild_derived` deletes the set later.
  IF public.anabranch_keeps_snapshot()
     OR EXISTS (SELECT FROM public.documents d WHERE d.access_set_id = candidate) THEN
    RETURN;
  END IF;
  PERFORM FROM public.access_sets s WHERE s.id = candidate FOR UPDATE SKIP LOCKED;
  IF FOUND THEN
    -- Check again: now that it is locked, no transaction can start to use it.
    DELETE FROM public.access_sets s
    WHERE s.id = candidate AND NOT EXISTS (SELECT FROM public.documents d WHERE d.access_set_id = candidate);
  END IF;
END
$$;

-- Sets the access sets of documents, which the caller has locked.
CREATE OR REPLACE FUNCTION public.anabranch_update_access(ids uuid[]) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  unchanged uuid;
BEGIN
  -- The BEFORE trigger replaces any written value by the correct access set.
  UPDATE public.documents d
  SET access_set_id = CASE WHEN d.access_set_id IS NULL THEN 0 END
  WHERE d.id = ANY (ids)
    AND (SELECT s.principals FROM public.access_sets s WHERE s.id = d.access_set_id)
        IS DISTINCT FROM public.anabranch_readers(d.id);
  -- Another trigger may have suppressed the update: an error is better than an ineffective revocation.
  SELECT d.id INTO unchanged
  FROM public.documents d
  WHERE d.id = ANY (ids)
    AND (SELECT s.principals FROM public.access_sets s WHERE s.id = d.access_set_id)
        IS DISTINCT FROM public.anabranch_readers(d.id)
  LIMIT 1;
  IF FOUND THEN
    RAISE EXCEPTION 'a trigger on documents suppressed the access change of document %', unchanged
      USING ERRCODE = 'triggered_action_exception',
            HINT = 'Make BEFORE UPDATE triggers on public.documents return NEW without changing access_set_id.';
  END IF;
END
$$;

-- Metadata

-- Searches use those too that return an entry, a value's form, or merged metadata.

-- The form of a value in results and filters: strings unchanged, everything else as JSON. Null only for a missing value.
CREATE OR REPLACE FUNCTION public.anabranch_metadata_text(value jsonb) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
  SELECT CASE WHEN pg_catalog.jsonb_typeof(value) OPERATOR(pg_catalog.=) 'string'
              THEN value OPERATOR(pg_catalog.#>>) '{}' ELSE value::pg_catalog.text END
$$;

-- A chunk's metadata: its document's, overridden by its own. Anything but an object counts as empty.
CREATE OR REPLACE FUNCTION public.anabranch_merged_metadata(document jsonb, chunk jsonb) RETURNS jsonb
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
  SELECT CASE WHEN pg_catalog.jsonb_typeof(document) OPERATOR(pg_catalog.=) 'object' THEN document ELSE '{}' END
         OPERATOR(pg_catalog.||)
         CASE WHEN pg_catalog.jsonb_typeof(chunk) OPERATOR(pg_catalog.=) 'object' THEN chunk ELSE '{}' END
$$;

-- The key of a row of chunk_metadata: for a value.
CREATE OR REPLACE FUNCTION public.anabranch_metadata_entry(key text, value text) RETURNS uuid
LANGUAGE sql STABLE PARALLEL SAFE
AS $$
  SELECT pg_catalog.encode(pg_catalog.substr(pg_catalog.sha256(
    pg_catalog.convert_to(key, 'UTF8') OPERATOR(pg_catalog.||) pg_catalog.decode('00', 'hex')
    OPERATOR(pg_catalog.||) pg_catalog.convert_to(value, 'UTF8')), 1, 16), 'hex')::pg_catalog.uuid
$$;

-- The same for an element of an array.
CREATE OR REPLACE FUNCTION public.anabranch_element_entry(key text, element text) RETURNS uuid
LANGUAGE sql STABLE PARALLEL SAFE
AS $$
  SELECT pg_catalog.encode(pg_catalog.substr(pg_catalog.sha256(
    pg_catalog.convert_to(key, 'UTF8') OPERATOR(pg_catalog.||) pg_catalog.decode('0000', 'hex')
    OPERATOR(pg_catalog.||) pg_catalog.convert_to(element, 'UTF8')), 1, 16), 'hex')::pg_catalog.uuid
$$;

-- The same for a number or a date.
CREATE OR REPLACE FUNCTION public.anabranch_range_entry(key text) RETURNS uuid
LANGUAGE sql STABLE PARALLEL SAFE
AS $$
  SELECT pg_catalog.encode(pg_catalog.substr(pg_catalog.sha256(
    pg_catalog.convert_to(key, 'UTF8') OPERATOR(pg_catalog.||) pg_catalog.decode('000000', 'hex')), 1, 16), 'hex')::pg_catalog.uuid
$$;

-- A value, in the form of anabranch_metadata_text, as a number; null if it is not written like one in JSON, or if double
-- precision has no room for it. Never fails: conversions that may are behind conditions.
CREATE OR REPLACE FUNCTION public.anabranch_metadata_number(value text) RETURNS double precision
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
  SELECT CASE
    WHEN pg_catalog.length(value) OPERATOR(pg_catalog.<=) 1000
         AND value COLLATE pg_catalog."C" OPERATOR(pg_catalog.~)
             '^-?(0|[1-9][0-9]*)([.][0-9]+)?([eE][-+]?[0-9]{1,3})?$'
    THEN CASE WHEN pg_catalog.abs(value::pg_catalog.numeric) OPERATOR(pg_catalog.<=) 1.7976931348623157e308
                   AND (pg_catalog.abs(value::pg_catalog.numeric) OPERATOR(pg_catalog.>=) 5e-324
                        OR value::pg_catalog.numeric OPERATOR(pg_catalog.=) 0)
              THEN value::pg_catalog.float8 END
  END
$$;

-- The same as an instant, of a date or a date and time in ISO 8601; without a time zone, in UTC.
CREATE OR REPLACE FUNCTION public.anabranch_metadata_instant(value text) RETURNS timestamp with time zone
LANGUAGE sql STABLE PARALLEL SAFE
AS $$
  SELECT CASE
    WHEN value COLLATE pg_catalog."C" OPERATOR(pg_catalog.~) (
      '^(?!0000)([0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)'
      '|02-(0[1-9]|1[0-9]|2[0-8]))|([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)-02-29)'
      '([Tt ]([01][0-9]|2[0-3]):[0-5][0-9](:[0-5][0-9]([.][0-9]{1,9})?)?([Zz]|[-+](0[0-9]|1[0-4]):?[0-5][0-9])?)?$')
    THEN (CASE
      WHEN pg_catalog.length(value) OPERATOR(pg_catalog.=) 10 THEN value OPERATOR(pg_catalog.||) ' 00:00Z'
      WHEN pg_catalog.substr(value, 12) OPERATOR(pg_catalog.~) '[-+Zz]' THEN value
      ELSE value OPERATOR(pg_catalog.||) 'Z' END)::pg_catalog.timestamptz
  END
$$;

-- The rows of chunk_metadata for a chunk.
CREATE OR REPLACE FUNCTION public.anabranch_metadata_rows(document jsonb, chunk jsonb)
RETURNS TABLE (entry uuid, number double precision, instant timestamp with time zone)
LANGUAGE sql STABLE PARALLEL SAFE
AS $$
  SELECT public.anabranch_metadata_entry(m.key, public.anabranch_metadata_text(m.value)) AS entry,
         NULL::pg_catalog.float8, NULL::pg_catalog.timestamptz
  FROM pg_catalog.jsonb_each(public.anabranch_merged_metadata(document, chunk)) m
  UNION ALL
  SELECT DISTINCT public.anabranch_element_entry(m.key, public.anabranch_metadata_text(e.value)) AS entry,
         NULL::pg_catalog.float8, NULL::pg_catalog.timestamptz
  FROM pg_catalog.jsonb_each(public.anabranch_merged_metadata(document, chunk)) m
  CROSS JOIN LATERAL pg_catalog.jsonb_array_elements(
    CASE WHEN pg_catalog.jsonb_typeof(m.value) OPERATOR(pg_catalog.=) 'array' THEN m.value ELSE '[]' END) e
  UNION ALL
  SELECT public.anabranch_range_entry(r.key) AS entry, r.number, r.instant
  FROM (SELECT m.key, public.anabranch_metadata_number(public.anabranch_metadata_text(m.value)) AS number,
               public.anabranch_metadata_instant(public.anabranch_metadata_text(m.value)) AS instant
        FROM pg_catalog.jsonb_each(public.anabranch_merged_metadata(document, chunk)) m
        OFFSET 0) r -- an optimization fence: computed once
  WHERE r.number IS NOT NULL OR r.instant IS NOT NULL
$$;

-- Rebuilds chunk_metadata for the given chunks. With a generic plan: otherwise, each call would be planned again, because
-- most get fewer chunks than the planner assumes, and planning takes longer than the rest.
CREATE OR REPLACE FUNCTION public.anabranch_rebuild_metadata(chunks uuid[]) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
AS $$
BEGIN
  DELETE FROM public.chunk_metadata m WHERE m.chunk_id = ANY (chunks);
  INSERT INTO public.chunk_metadata (entry, chunk_id, access_set_id, number, instant)
  SELECT e.entry, c.id, c.access_set_id, e.number, e.instant
  FROM public.document_chunks c
  LEFT JOIN public.documents d ON d.id = c.document_id
  CROSS JOIN LATERAL public.anabranch_metadata_rows(d.metadata, c.metadata) e
  WHERE c.id = ANY (chunks)
  ON CONFLICT DO NOTHING;
END
$$;

-- Topics

-- The topics of a chunk: without duplicates and nulls.
CREATE OR REPLACE FUNCTION public.anabranch_topics(related_topic_ids uuid[]) RETURNS SETOF uuid
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
  SELECT DISTINCT r.topic_id FROM pg_catalog.unnest(related_topic_ids) r (topic_id) WHERE r.topic_id IS NOT NULL
$$;

-- Trigger functions
--
-- Plans are cached per session. A plan made while the tables were empty would scan them for each row of a bulk load.
-- Therefore enable_seqscan is off in these functions and in all functions that they call.

-- After a change of grants: update their documents. Per statement, so that bulk loads are fast.
CREATE OR REPLACE FUNCTION public.anabranch_sync_grants() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off
AS $$
DECLARE
  keyed boolean := public.anabranch_has_document_key('public.document_grants');
  touched uuid[];
BEGIN
  IF TG_OP = 'INSERT' THEN
    SELECT array_agg(DISTINCT n.document_id) INTO touched FROM new_grants n;
  ELSIF TG_OP = 'DELETE' THEN
    SELECT array_agg(DISTINCT o.document_id) INTO touched FROM old_grants o;
  ELSIF TG_OP = 'UPDATE' THEN
    SELECT array_agg(DISTINCT u.document_id) INTO touched
    FROM (SELECT n.document_id FROM new_grants n UNION ALL SELECT o.document_id FROM old_grants o) u;
  ELSE
    SELECT array_agg(d.id) INTO touched FROM public.documents d WHERE d.access_set_id IS NOT NULL;
  END IF;
  IF touched IS NULL AND TG_OP <> 'TRUNCATE' THEN
    RETURN NULL;
  END IF;
  PERFORM public.anabranch_require_read_committed(keyed AND TG_OP <> 'TRUNCATE');
  -- With a foreign key, a missing document was deleted by this transaction: an insert of the same id waits for it.
  PERFORM public.anabranch_lock_documents(touched, and_missing => NOT keyed);
  PERFORM public.anabranch_update_access(touched);
  RETURN NULL;
END
$$;

-- Before a document is written: replaces any given access set by the correct one. For a new id there is no row to lock
-- yet (rule 2), so the AFTER trigger does it.
CREATE OR REPLACE FUNCTION public.anabranch_set_document_access() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off
AS $$
BEGIN
  IF TG_OP = 'INSERT' OR NEW.id IS DISTINCT FROM OLD.id THEN
    NEW.access_set_id := NULL;
  ELSE
    NEW.access_set_id := public.anabranch_access_set(NEW.id);
  END IF;
  RETURN NEW;
END
$$;

-- After a document is inserted or deleted, or its access or metadata changes: updates its chunks.
CREATE OR REPLACE FUNCTION public.anabranch_sync_document() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off
AS $$
DECLARE
  arrives boolean := TG_OP = 'INSERT' OR TG_OP = 'UPDATE' AND NEW.id <> OLD.id;
  leaves boolean := TG_OP = 'DELETE' OR TG_OP = 'UPDATE' AND NEW.id <> OLD.id;
  changes boolean := TG_OP = 'UPDATE' AND NEW.access_set_id IS DISTINCT FROM OLD.access_set_id;
  current_set bigint;
  touched uuid[];
BEGIN
  -- If there is a foreign key, it handles the chunks of a deleted document.
  IF TG_OP <> 'INSERT' THEN
    PERFORM public.anabranch_require_read_committed(
      TG_OP <> 'UPDATE' AND public.anabranch_has_document_key('public.document_chunks'));
  END IF;
  IF TG_OP = 'TRUNCATE' THEN
    UPDATE public.document_chunks c SET access_set_id = NULL WHERE c.access_set_id IS NOT NULL;
    IF EXISTS (SELECT FROM public.document_chunks c WHERE c.access_set_id IS NOT NULL) THEN
      RAISE EXCEPTION 'a trigger on document_chunks suppressed the access change of all documents'
        USING ERRCODE = 'triggered_action_exception',
              HINT = 'Make BEFORE UPDATE triggers on public.document_chunks return NEW without changing access_set_id.';
    END IF;
    PERFORM public.anabranch_discard_access_set(s.id) FROM public.access_sets s;
    SELECT array_agg(c.id) INTO touched FROM public.document_chunks c;
    PERFORM public.anabranch_rebuild_metadata(touched);
    RETURN NULL;
  END IF;
  IF arrives THEN
    PERFORM public.anabranch_share_id_lock(NEW.id);
    IF public.anabranch_keeps_snapshot() THEN
      -- The snapshot may also contain an older document with the same id. Locking that one fails.
      PERFORM FROM public.documents d WHERE d.id = NEW.id FOR KEY SHARE;
    END IF;
  END IF;
  IF leaves THEN
    UPDATE public.document_chunks c SET access_set_id = NULL
    WHERE c.document_id = OLD.id AND c.access_set_id IS NOT NULL;
    -- Another trigger may have suppressed the update: an error is better than an ineffective revocation.
    IF EXISTS (SELECT FROM public.document_chunks c
               WHERE c.document_id = OLD.id
                 AND c.access_set_id IS DISTINCT FROM
                     (SELECT d.access_set_id FROM public.documents d WHERE d.id = OLD.id)) THEN
      RAISE EXCEPTION 'a trigger on document_chunks suppressed the access change of document %', OLD.id
        USING ERRCODE = 'triggered_action_exception',
              HINT = 'Make BEFORE UPDATE triggers on public.document_chunks return NEW without changing access_set_id.';
    END IF;
  END IF;
  IF arrives OR changes THEN
    -- A no-op unless the id is new, or another BEFORE trigger ran after ours and changed the access set.
    PERFORM public.anabranch_update_access(ARRAY[NEW.id]);
    SELECT d.access_set_id INTO current_set FROM public.documents d WHERE d.id = NEW.id;
    UPDATE public.document_chunks c SET access_set_id = current_set
    WHERE c.document_id = NEW.id AND c.access_set_id IS DISTINCT FROM current_set;
    -- See above.
    IF EXISTS (SELECT FROM public.document_chunks c
               WHERE c.document_id = NEW.id AND c.access_set_id IS DISTINCT FROM current_set) THEN
      RAISE EXCEPTION 'a trigger on document_chunks suppressed the access change of document %', NEW.id
        USING ERRCODE = 'triggered_action_exception',
              HINT = 'Make BEFORE UPDATE triggers on public.document_chunks return NEW without changing access_set_id.';
    END IF;
  END IF;
  IF (leaves OR changes) AND OLD.access_set_id IS NOT NULL THEN
    PERFORM public.anabranch_discard_access_set(OLD.access_set_id);
  END IF;
  IF arrives OR leaves OR NEW.metadata IS DISTINCT FROM OLD.metadata THEN
    -- Locked against a concurrent delete: the entries of a deleted chunk would remain.
    SELECT array_agg(c.id) INTO touched
    FROM (SELECT its.id FROM public.document_chunks its
          WHERE its.document_id = OLD.id OR its.document_id = NEW.id
          ORDER BY its.id
          FOR KEY SHARE) c;
    IF touched IS NOT NULL THEN
      PERFORM public.anabranch_rebuild_metadata(touched);
    END IF;
  END IF;
  RETURN NULL;
END
$$;

-- Before a chunk is inserted, moved or its metadata changes: replaces any given access set by its document's. The lock
-- prevents missing a concurrent revocation.
CREATE OR REPLACE FUNCTION public.anabranch_set_chunk_access() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off
AS $$
BEGIN
  IF TG_OP = 'UPDATE' AND OLD.document_id IS DISTINCT FROM NEW.document_id THEN
    -- Also lock the previous document: a concurrent change of its metadata would still find the chunk there.
    PERFORM FROM public.documents d WHERE d.id IN (OLD.document_id, NEW.document_id) ORDER BY d.id FOR SHARE;
    IF OLD.document_id IS NOT NULL
       AND NOT EXISTS (SELECT FROM public.documents d WHERE d.id = OLD.document_id) THEN
      PERFORM public.anabranch_require_read_committed(public.anabranch_has_document_key('public.document_chunks'));
      PERFORM public.anabranch_lock_documents(ARRAY[OLD.document_id], and_missing => true);
    END IF;
  END IF;
  SELECT d.access_set_id INTO NEW.access_set_id FROM public.documents d WHERE d.id = NEW.document_id FOR SHARE;
  -- If only the access set changes, for example because the document is deleted, an insert of the document finds the
  -- chunk.
  IF NOT FOUND AND NEW.document_id IS NOT NULL AND NOT (
       TG_OP = 'UPDATE' AND NEW.document_id IS NOT DISTINCT FROM OLD.document_id
       AND NEW.metadata IS NOT DISTINCT FROM OLD.metadata) THEN
    PERFORM public.anabranch_require_read_committed(public.anabranch_has_document_key('public.document_chunks'));
    PERFORM public.anabranch_lock_documents(ARRAY[NEW.document_id], and_missing => true);
    SELECT d.access_set_id INTO NEW.access_set_id FROM public.documents d WHERE d.id = NEW.document_id FOR SHARE;
  END IF;
  RETURN NEW;
END
$$;

-- After a chunk is inserted, deleted or changed: updates chunk_topics and chunk_metadata.
CREATE OR REPLACE FUNCTION public.anabranch_sync_chunk() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off
AS $$
DECLARE
  chunk record;
  document record;
  retopics boolean := TG_OP <> 'UPDATE' OR NEW.id <> OLD.id
    OR NEW.session_id IS DISTINCT FROM OLD.session_id
    OR NEW.related_topic_ids IS DISTINCT FROM OLD.related_topic_ids;
  redescribes boolean := TG_OP <> 'UPDATE' OR NEW.id <> OLD.id
    OR NEW.document_id IS DISTINCT FROM OLD.document_id
    OR NEW.metadata IS DISTINCT FROM OLD.metadata;
BEGIN
  IF TG_OP = 'TRUNCATE' THEN
    TRUNCATE public.chunk_topics, public.chunk_metadata;
    RETURN NULL;
  END IF;
  IF TG_OP <> 'INSERT' THEN
    IF retopics THEN
      DELETE FROM public.chunk_topics t WHERE t.chunk_id = OLD.id;
    END IF;
    IF redescribes THEN
      IF public.anabranch_keeps_snapshot() THEN
        -- Entries derived after the snapshot are not visible and would remain. The transaction that derived them has
        -- written the document, so this fails then.
        PERFORM FROM public.documents d WHERE d.id = OLD.document_id FOR SHARE;
        IF NOT FOUND AND OLD.document_id IS NOT NULL THEN
          PERFORM public.anabranch_require_read_committed(public.anabranch_has_document_key('public.document_chunks'));
        END IF;
      END IF;
      DELETE FROM public.chunk_metadata m WHERE m.chunk_id = OLD.id;
    END IF;
  END IF;
  IF TG_OP = 'DELETE' THEN
    RETURN NULL;
  END IF;

  IF public.anabranch_keeps_snapshot() THEN
    -- The snapshot may also contain an older chunk with the same id. Locking that one fails.
    PERFORM FROM public.document_chunks c WHERE c.id = NEW.id FOR KEY SHARE;
  END IF;
  -- The current row: an earlier trigger of the same statement may have changed or deleted it.
  SELECT c.id, c.document_id, c.session_id, c.related_topic_ids, c.metadata, c.access_set_id INTO chunk
  FROM public.document_chunks c WHERE c.id = NEW.id;
  IF NOT FOUND THEN
    RETURN NULL;
  END IF;
  IF retopics THEN
    INSERT INTO public.chunk_topics (topic_id, chunk_id, session_id, access_set_id)
    SELECT r.topic_id, chunk.id, chunk.session_id, chunk.access_set_id
    FROM public.anabranch_topics(chunk.related_topic_ids) AS r (topic_id)
    ON CONFLICT DO NOTHING;
  END IF;
  IF NOT redescribes AND NEW.access_set_id IS NOT DISTINCT FROM OLD.access_set_id THEN
    RETURN NULL;
  END IF;

  -- Lock and compare again: another BEFORE trigger that ran after ours may have changed the document or the access set.
  SELECT d.metadata, d.access_set_id INTO document FROM public.documents d WHERE d.id = chunk.document_id FOR SHARE;
  IF chunk.access_set_id IS DISTINCT FROM document.access_set_id THEN
    RAISE EXCEPTION 'a trigger on document_chunks changed the document or access set of chunk %', chunk.id
      USING ERRCODE = 'triggered_action_exception',
            HINT = 'Rename BEFORE triggers on public.document_chunks so that they sort before zz_anabranch.';
  END IF;
  IF redescribes THEN
    INSERT INTO public.chunk_metadata (entry, chunk_id, access_set_id, number, instant)
    SELECT e.entry, chunk.id, chunk.access_set_id, e.number, e.instant
    FROM public.anabranch_metadata_rows(document.metadata, chunk.metadata) e
    ON CONFLICT DO NOTHING;
  END IF;
  IF TG_OP = 'UPDATE' THEN
    UPDATE public.chunk_topics t SET access_set_id = chunk.access_set_id
    WHERE t.chunk_id = chunk.id AND t.access_set_id IS DISTINCT FROM chunk.access_set_id;
    UPDATE public.chunk_metadata m SET access_set_id = chunk.access_set_id
    WHERE m.chunk_id = chunk.id AND m.access_set_id IS DISTINCT FROM chunk.access_set_id;
  END IF;
  RETURN NULL;
END
$$;

CREATE OR REPLACE TRIGGER zz_anabranch_grants_inserted AFTER INSERT ON public.document_grants
  REFERENCING NEW TABLE AS new_grants
  FOR EACH STATEMENT EXECUTE FUNCTION public.anabranch_sync_grants();
CREATE OR REPLACE TRIGGER zz_anabranch_grants_updated AFTER UPDATE ON public.document_grants
  REFERENCING OLD TABLE AS old_grants NEW TABLE AS new_grants
  FOR EACH STATEMENT EXECUTE FUNCTION public.anabranch_sync_grants();
CREATE OR REPLACE TRIGGER zz_anabranch_grants_deleted AFTER DELETE ON public.document_grants
  REFERENCING OLD TABLE AS old_grants
  FOR EACH STATEMENT EXECUTE FUNCTION public.anabranch_sync_grants();
CREATE OR REPLACE TRIGGER zz_anabranch_grants_truncated AFTER TRUNCATE ON public.document_grants
  FOR EACH STATEMENT EXECUTE FUNCTION public.anabranch_sync_grants();

-- Triggers fire in alphabetical order: with `zz`, a back end's own BEFORE triggers run first. With the conditions, these
-- triggers cost nothing for ordinary updates (a title, a text, an embedding).
CREATE OR REPLACE TRIGGER zz_anabranch_document_inserting BEFORE INSERT ON public.documents
  FOR EACH ROW EXECUTE FUNCTION public.anabranch_set_document_access();
CREATE OR REPLACE TRIGGER zz_anabranch_document_updating BEFORE UPDATE ON public.documents
  FOR EACH ROW WHEN (new.id <> old.id OR new.access_set_id IS DISTINCT FROM old.access_set_id)
  EXECUTE FUNCTION public.anabranch_set_document_access();
CREATE OR REPLACE TRIGGER zz_anabranch_document_inserted AFTER INSERT ON public.documents
  FOR EACH ROW EXECUTE FUNCTION public.anabranch_sync_document();
CREATE OR REPLACE TRIGGER zz_anabranch_document_updated AFTER UPDATE ON public.documents
  FOR EACH ROW WHEN (new.id <> old.id
    OR new.metadata IS DISTINCT FROM old.metadata
    OR new.access_set_id IS DISTINCT FROM old.access_set_id)
  EXECUTE FUNCTION public.anabranch_sync_document();
CREATE OR REPLACE TRIGGER zz_anabranch_document_deleted AFTER DELETE ON public.documents
  FOR EACH ROW EXECUTE FUNCTION public.anabranch_sync_document();
CREATE OR REPLACE TRIGGER zz_anabranch_document_truncated AFTER TRUNCATE ON public.documents
  FOR EACH STATEMENT EXECUTE FUNCTION public.anabranch_sync_document();

CREATE OR REPLACE TRIGGER zz_anabranch_chunk_inserting BEFORE INSERT ON public.document_chunks
  FOR EACH ROW EXECUTE FUNCTION public.anabranch_set_chunk_access();
CREATE OR REPLACE TRIGGER zz_anabranch_chunk_updating BEFORE UPDATE ON public.document_chunks
  FOR EACH ROW WHEN (new.document_id IS DISTINCT FROM old.document_id
    OR new.metadata IS DISTINCT FROM old.metadata
    OR new.access_set_id IS DISTINCT FROM old.access_set_id)
  EXECUTE FUNCTION public.anabranch_set_chunk_access();
CREATE OR REPLACE TRIGGER zz_anabranch_chunk_inserted AFTER INSERT ON public.document_chunks
  FOR EACH ROW EXECUTE FUNCTION public.anabranch_sync_chunk();
-- `IS NOT FALSE`: the values differ, or one of them is null.
CREATE OR REPLACE TRIGGER zz_anabranch_chunk_updated AFTER UPDATE ON public.document_chunks
  FOR EACH ROW WHEN (new.id <> old.id
    OR new.document_id IS DISTINCT FROM old.document_id
    OR (new.related_topic_ids OPERATOR(pg_catalog.<>) old.related_topic_ids) IS NOT FALSE
    OR new.session_id IS DISTINCT FROM old.session_id
    OR new.metadata IS DISTINCT FROM old.metadata
    OR new.access_set_id IS DISTINCT FROM old.access_set_id)
  EXECUTE FUNCTION public.anabranch_sync_chunk();
CREATE OR REPLACE TRIGGER zz_anabranch_chunk_deleted AFTER DELETE ON public.document_chunks
  FOR EACH ROW EXECUTE FUNCTION public.anabranch_sync_chunk();
CREATE OR REPLACE TRIGGER zz_anabranch_chunk_truncated AFTER TRUNCATE ON public.document_chunks
  FOR EACH STATEMENT EXECUTE FUNCTION public.anabranch_sync_chunk();

-- Verification: rows whose derived data differs from the defining rule. Empty as long as every write fired the triggers.

CREATE OR REPLACE FUNCTION public.anabranch_stale_documents() RETURNS TABLE (id uuid)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
  SELECT d.id
  FROM public.documents d
  LEFT JOIN public.access_sets s ON s.id = d.access_set_id
  LEFT JOIN public.anabranch_all_readers() truth ON truth.document_id = d.id
  WHERE s.principals IS DISTINCT FROM truth.principals
$$;

CREATE OR REPLACE FUNCTION public.anabranch_stale_chunks() RETURNS TABLE (id uuid)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
  SELECT c.id
  FROM public.document_chunks c
  LEFT JOIN public.documents d ON d.id = c.document_id
  WHERE c.access_set_id IS DISTINCT FROM d.access_set_id
$$;

CREATE OR REPLACE FUNCTION public.anabranch_stale_topics() RETURNS TABLE (chunk_id uuid)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
  SELECT coalesce(t.chunk_id, truth.chunk_id)
  FROM public.chunk_topics t
  FULL JOIN (
    SELECT r.topic_id, c.id AS chunk_id, c.session_id, c.access_set_id
    FROM public.document_chunks c
    CROSS JOIN LATERAL public.anabranch_topics(c.related_topic_ids) AS r (topic_id)
  ) truth ON truth.topic_id = t.topic_id AND truth.chunk_id = t.chunk_id
  WHERE t.chunk_id IS NULL OR truth.chunk_id IS NULL
     OR t.session_id IS DISTINCT FROM truth.session_id
     OR t.access_set_id IS DISTINCT FROM truth.access_set_id
$$;

CREATE OR REPLACE FUNCTION public.anabranch_stale_metadata() RETURNS TABLE (chunk_id uuid)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
  SELECT coalesce(m.chunk_id, truth.chunk_id)
  FROM public.chunk_metadata m
  FULL JOIN (
    SELECT e.entry, c.id AS chunk_id, c.access_set_id, e.number, e.instant
    FROM public.document_chunks c
    LEFT JOIN public.documents d ON d.id = c.document_id
    CROSS JOIN LATERAL public.anabranch_metadata_rows(d.metadata, c.metadata) e
  ) truth ON truth.entry = m.entry AND truth.chunk_id = m.chunk_id
  WHERE m.chunk_id IS NULL OR truth.chunk_id IS NULL
     OR m.access_set_id IS DISTINCT FROM truth.access_set_id
     OR m.number IS DISTINCT FROM truth.number
     OR m.instant IS DISTINCT FROM truth.instant
$$;

-- Repair, in batches that lock only their own rows: for rows written before the triggers existed, and for writes that
-- bypassed them (a restore with triggers disabled, logical replication, session_replication_role).

-- Rebuilds the access sets of the given documents and their chunks.
CREATE OR REPLACE FUNCTION public.anabranch_rebuild_documents(ids uuid[]) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off
AS $$
BEGIN
  PERFORM public.anabranch_lock_documents(ids, and_missing => false);
  PERFORM public.anabranch_update_access(ids);
  UPDATE public.document_chunks c
  SET access_set_id = d.access_set_id
  FROM public.documents d
  WHERE d.id = ANY (ids) AND c.document_id = d.id AND c.access_set_id IS DISTINCT FROM d.access_set_id;
END
$$;

-- Rebuilds all derived data of the given chunks; some of them may already be deleted.
CREATE OR REPLACE FUNCTION public.anabranch_rebuild_chunks(ids uuid[]) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off
AS $$
BEGIN
  -- Lock documents first, in the same order as writes do.
  PERFORM FROM public.documents d
  WHERE d.id = ANY (ARRAY(SELECT c.document_id FROM public.document_chunks c WHERE c.id = ANY (ids)))
  ORDER BY d.id FOR SHARE;
  PERFORM FROM public.document_chunks c WHERE c.id = ANY (ids) ORDER BY c.id FOR NO KEY UPDATE;
  UPDATE public.document_chunks c
  SET access_set_id = truth.access_set_id
  FROM (SELECT known.id, d.access_set_id
        FROM public.document_chunks known
        LEFT JOIN public.documents d ON d.id = known.document_id
        WHERE known.id = ANY (ids)) truth
  WHERE c.id = truth.id AND c.access_set_id IS DISTINCT FROM truth.access_set_id;
  DELETE FROM public.chunk_topics t WHERE t.chunk_id = ANY (ids);
  INSERT INTO public.chunk_topics (topic_id, chunk_id, session_id, access_set_id)
  SELECT r.topic_id, c.id, c.session_id, c.access_set_id
  FROM public.document_chunks c
  CROSS JOIN LATERAL public.anabranch_topics(c.related_topic_ids) AS r (topic_id)
  WHERE c.id = ANY (ids)
  ON CONFLICT DO NOTHING;
  PERFORM public.anabranch_rebuild_metadata(ids);
END
$$;

-- Rebuilds all derived data at once, and returns how many rows were stale.
CREATE OR REPLACE FUNCTION public.anabranch_rebuild_derived(
  OUT documents bigint, OUT chunks bigint, OUT topics bigint, OUT metadata bigint, OUT sets bigint) RETURNS record
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  stale uuid[];
BEGIN
  SELECT array_agg(s.id) INTO stale FROM public.anabranch_stale_documents() s;
  documents := coalesce(cardinality(stale), 0);
  PERFORM public.anabranch_rebuild_documents(stale);
  SELECT array_agg(s.id) INTO stale FROM public.anabranch_stale_chunks() s;
  chunks := coalesce(cardinality(stale), 0);
  PERFORM public.anabranch_rebuild_chunks(stale);
  SELECT array_agg(DISTINCT s.chunk_id) INTO stale FROM public.anabranch_stale_topics() s;
  topics := coalesce(cardinality(stale), 0);
  PERFORM public.anabranch_rebuild_chunks(stale);
  SELECT array_agg(DISTINCT s.chunk_id) INTO stale FROM public.anabranch_stale_metadata() s;
  metadata := coalesce(cardinality(stale), 0);
  PERFORM public.anabranch_rebuild_chunks(stale);
  SELECT count(*) INTO sets FROM public.access_sets;
  PERFORM public.anabranch_discard_access_set(s.id) FROM public.access_sets s;
  SELECT sets - count(*) INTO sets FROM public.access_sets;
END
$$;

-- Only the owner may execute these functions, except those in 006_access.sql; triggers do not need this right.
REVOKE ALL ON FUNCTION
  public.anabranch_keeps_snapshot(), public.anabranch_has_document_key(regclass),
  public.anabranch_require_read_committed(boolean),
  public.anabranch_lock_documents(uuid[], boolean), public.anabranch_share_id_lock(uuid),
  public.anabranch_all_readers(), public.anabranch_readers(uuid), public.anabranch_access_set(uuid), public.anabranch_discard_access_set(bigint),
  public.anabranch_update_access(uuid[]),
  public.anabranch_metadata_text(jsonb), public.anabranch_merged_metadata(jsonb, jsonb),
  public.anabranch_metadata_entry(text, text), public.anabranch_element_entry(text, text),
  public.anabranch_range_entry(text), public.anabranch_metadata_number(text), public.anabranch_metadata_instant(text),
  public.anabranch_metadata_rows(jsonb, jsonb),
  public.anabranch_rebuild_metadata(uuid[]), public.anabranch_topics(uuid[]),
  public.anabranch_sync_grants(), public.anabranch_set_document_access(), public.anabranch_sync_document(),
  public.anabranch_set_chunk_access(), public.anabranch_sync_chunk(),
  public.anabranch_stale_documents(), public.anabranch_stale_chunks(), public.anabranch_stale_topics(),
  public.anabranch_stale_metadata(),
  public.anabranch_rebuild_documents(uuid[]), public.anabranch_rebuild_chunks(uuid[]),
  public.anabranch_rebuild_derived()
  FROM PUBLIC;
