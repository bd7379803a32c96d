-- The reference schema of version 1, the first release, as it was released: what an upgrade starts from.
-- The store's tables. A back end that has them already keeps its own: only what is missing is added.
--
-- These files are plain SQL, applied in order by `anabranch migrate`, or by hand in one transaction:
--   psql --single-transaction -v principals_setting=anabranch.principals -f 001_tables.sql -f 002_derived.sql …
-- `migrate` leaves out each statement whose object is there already, so a second run takes no lock on a table.
-- A statement ends with a semicolon at the end of a line, outside of $$ … $$.

CREATE TABLE IF NOT EXISTS public.documents (
  id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
  session_id uuid,
  title text,
  source_url text,
  file_description text,
  document_type text,
  metadata jsonb DEFAULT '{}'
);

-- A parent may be missing (it is then reported, not refused), so parent_chunk_id has no foreign key.
-- A chunk without an embedding is never searched: a problem's parent has none.
CREATE TABLE IF NOT EXISTS public.document_chunks (
  id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
  document_id uuid NOT NULL REFERENCES public.documents ON DELETE CASCADE,
  session_id uuid,
  parent_chunk_id uuid,
  related_topic_ids uuid[] NOT NULL DEFAULT '{}',
  chunk_type text,
  chunk_position int,
  text_content text NOT NULL,
  token_count int,
  page int,
  section text,
  coordinates jsonb,
  metadata jsonb DEFAULT '{}',
  embedding vector(768)
);

-- Who may read which document: the truth that all access control is derived from. `public` is everybody.
CREATE TABLE IF NOT EXISTS public.document_grants (
  document_id uuid NOT NULL REFERENCES public.documents ON DELETE CASCADE,
  principal text NOT NULL,
  PRIMARY KEY (document_id, principal)
);

-- Tables that were there before may lack a column.
ALTER TABLE public.documents ADD COLUMN IF NOT EXISTS session_id uuid;
ALTER TABLE public.documents ADD COLUMN IF NOT EXISTS title text;
ALTER TABLE public.documents ADD COLUMN IF NOT EXISTS source_url text;
ALTER TABLE public.documents ADD COLUMN IF NOT EXISTS file_description text;
ALTER TABLE public.documents ADD COLUMN IF NOT EXISTS document_type text;
ALTER TABLE public.documents ADD COLUMN IF NOT EXISTS metadata jsonb DEFAULT '{}';
ALTER TABLE public.document_chunks ADD COLUMN IF NOT EXISTS session_id uuid;
ALTER TABLE public.document_chunks ADD COLUMN IF NOT EXISTS parent_chunk_id uuid;
ALTER TABLE public.document_chunks ADD COLUMN IF NOT EXISTS related_topic_ids uuid[] NOT NULL DEFAULT '{}';
ALTER TABLE public.document_chunks ADD COLUMN IF NOT EXISTS chunk_type text;
ALTER TABLE public.document_chunks ADD COLUMN IF NOT EXISTS chunk_position int;
ALTER TABLE public.document_chunks ADD COLUMN IF NOT EXISTS token_count int;
ALTER TABLE public.document_chunks ADD COLUMN IF NOT EXISTS page int;
ALTER TABLE public.document_chunks ADD COLUMN IF NOT EXISTS section text;
ALTER TABLE public.document_chunks ADD COLUMN IF NOT EXISTS coordinates jsonb;
ALTER TABLE public.document_chunks ADD COLUMN IF NOT EXISTS metadata jsonb DEFAULT '{}';
ALTER TABLE public.document_chunks ADD COLUMN IF NOT EXISTS embedding vector(768);

-- 3 KiB vectors would be moved out of the row and fetched one by one: 3.5 times slower exact scans, 1.7 times slower
-- HNSW. Rows written before this stay where they are until the table is rewritten (VACUUM FULL).
ALTER TABLE public.document_chunks ALTER COLUMN embedding SET STORAGE PLAIN;

-- What is derived from the tables of the truth, so that a search under row-level security can be quick: from
-- document_grants, so that it tests one number a row instead of looking up grants; from arrays and JSON, so that it
-- has something an index can serve.
--
-- Each distinct set of readers is kept once (`access_sets`); a document and its chunks carry the number of their set.
-- Nobody but these triggers writes it: a value that is written by hand is replaced by the true one.
--
-- A chunk's topics, and its metadata with its document's, are kept once more in tables of their own.
--
-- What makes it right under concurrency, in READ COMMITTED (a stricter level's snapshot does not hold the chunks that
-- were added since; what would miss them is refused):
-- * whoever changes a document's grants locks its row (FOR NO KEY UPDATE) before reading them, so of two such
--   transactions the later one reads what the earlier one wrote;
-- * whoever adds a chunk, moves it or changes its metadata locks its document's row FOR SHARE before copying anything,
--   so no chunk can take over what is just being changed: it waits, or the change waits and then finds the chunk;
-- * sets are looked up and thrown away with SKIP LOCKED, so no transaction ever waits for another one's set. The
--   price is that a set may be there twice, which does no harm.
--
-- The functions run as the tables' owner, with a search_path that nobody can put anything into.

CREATE TABLE IF NOT EXISTS public.access_sets (
  id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  -- sorted, without duplicates
  principals text[] NOT NULL,
  -- what a set is found by: a btree on the array itself would refuse long ones
  digest bytea NOT NULL
);

-- Null: nobody may read it. The foreign key keeps a set that is in use from being thrown away.
ALTER TABLE public.documents ADD COLUMN IF NOT EXISTS access_set_id bigint REFERENCES public.access_sets;

-- No foreign key: it always equals the document's, which has one.
ALTER TABLE public.document_chunks ADD COLUMN IF NOT EXISTS access_set_id bigint;

-- The topics of each chunk, keyed by topic: under row-level security a GIN index on related_topic_ids goes unused,
-- because `@>` is not leakproof. No foreign key to the chunks: TRUNCATE document_chunks would then need CASCADE.
CREATE TABLE IF NOT EXISTS public.chunk_topics (
  topic_id uuid NOT NULL,
  chunk_id uuid NOT NULL,
  session_id uuid,
  access_set_id bigint,
  PRIMARY KEY (topic_id, chunk_id)
);

-- What filters on metadata look chunks up by: one row for each key and value of a chunk, its document's metadata
-- overlaid by its own. Here too a GIN index goes unused: jsonb's `@>` is not leakproof either.
CREATE TABLE IF NOT EXISTS public.chunk_metadata (
  -- 128 bits of the SHA-256 of key, zero byte (which JSON in PostgreSQL cannot hold), value: of any length, and nobody
  -- can make two that meet.
  entry uuid NOT NULL,
  chunk_id uuid NOT NULL,
  access_set_id bigint,
  PRIMARY KEY (entry, chunk_id)
);

-- What a set is looked up and thrown away by; the triggers below need them as soon as there are rows.
CREATE INDEX IF NOT EXISTS access_sets_digest ON public.access_sets USING btree (digest);
CREATE INDEX IF NOT EXISTS documents_access_set_id ON public.documents USING btree (access_set_id);
CREATE INDEX IF NOT EXISTS document_chunks_document_id ON public.document_chunks USING btree (document_id);
CREATE INDEX IF NOT EXISTS chunk_topics_chunk_id ON public.chunk_topics USING btree (chunk_id);
CREATE INDEX IF NOT EXISTS chunk_metadata_chunk_id ON public.chunk_metadata USING btree (chunk_id);

-- The number of the set of readers that a document's grants amount to; null where there are none.
CREATE OR REPLACE FUNCTION public.anabranch_access_set(document uuid) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  readers text[];
  fingerprint bytea;
  found_id bigint;
BEGIN
  SELECT array_agg(DISTINCT g.principal::text COLLATE "C" ORDER BY g.principal::text COLLATE "C") INTO readers
  FROM public.document_grants g
  WHERE g.document_id = document;
  IF readers IS NULL THEN
    RETURN NULL;
  END IF;
  fingerprint := sha256(convert_to(to_jsonb(readers)::text, 'UTF8'));
  -- Locked, so that it cannot be thrown away before it is referred to.
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

-- Throws away a set that no document has any more. Intermediate sets come and go while grants are added one by one.
CREATE OR REPLACE FUNCTION public.anabranch_discard_access_set(candidate bigint) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
  -- Under a stricter isolation level the last test would read an old snapshot; `anabranch_derive_anew` does it later.
  IF current_setting('transaction_isolation') <> 'read committed'
     OR EXISTS (SELECT FROM public.documents d WHERE d.access_set_id = candidate) THEN
    RETURN;
  END IF;
  PERFORM FROM public.access_sets s WHERE s.id = candidate FOR UPDATE SKIP LOCKED;
  IF FOUND THEN
    -- Tested again: now that it is locked, nobody can begin to use it.
    DELETE FROM public.access_sets s
    WHERE s.id = candidate AND NOT EXISTS (SELECT FROM public.documents d WHERE d.access_set_id = candidate);
  END IF;
END
$$;

-- Grants changed: the documents follow. A statement at a time, so that a bulk load is cheap.
CREATE OR REPLACE FUNCTION public.anabranch_grants_changed() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
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
  -- In one order, so that two bulk loads cannot wait for each other.
  PERFORM FROM public.documents d WHERE d.id = ANY (touched) ORDER BY d.id FOR NO KEY UPDATE;
  UPDATE public.documents d
  SET access_set_id = truth.access_set_id
  FROM (SELECT t.id, public.anabranch_access_set(t.id) AS access_set_id
        FROM unnest(touched) AS t (id)
        WHERE EXISTS (SELECT FROM public.documents known WHERE known.id = t.id)) truth
  WHERE d.id = truth.id AND d.access_set_id IS DISTINCT FROM truth.access_set_id;
  RETURN NULL;
END
$$;

-- A document is written: whatever its access set was given as, the true one is stored.
CREATE OR REPLACE FUNCTION public.anabranch_document_written() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
  NEW.access_set_id := public.anabranch_access_set(NEW.id);
  RETURN NEW;
END
$$;

-- Values as results carry them: strings as they are, anything else as JSON.
CREATE OR REPLACE FUNCTION public.anabranch_metadata_entries(document jsonb, chunk jsonb) RETURNS SETOF uuid
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
  SELECT encode(substr(sha256(convert_to(m.key, 'UTF8') || '\x00' || convert_to(
    CASE jsonb_typeof(m.value) WHEN 'string' THEN m.value #>> '{}' ELSE m.value::text END, 'UTF8')), 1, 16), 'hex')::uuid
  FROM jsonb_each(CASE WHEN jsonb_typeof(document) = 'object' THEN document ELSE '{}' END
               || CASE WHEN jsonb_typeof(chunk) = 'object' THEN chunk ELSE '{}' END) m
$$;

-- Derives chunk_metadata anew for some chunks.
CREATE OR REPLACE FUNCTION public.anabranch_derive_metadata(chunks uuid[]) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
  DELETE FROM public.chunk_metadata m WHERE m.chunk_id = ANY (chunks);
  INSERT INTO public.chunk_metadata (entry, chunk_id, access_set_id)
  SELECT e.entry, c.id, c.access_set_id
  FROM public.document_chunks c
  LEFT JOIN public.documents d ON d.id = c.document_id
  CROSS JOIN LATERAL public.anabranch_metadata_entries(d.metadata, c.metadata) AS e (entry)
  WHERE c.id = ANY (chunks);
END
$$;

-- Refuses a change of documents that a stricter isolation level's snapshot would make wrong. Chunks of a document that
-- goes are the foreign key's, where there is one: it looks past the snapshot.
CREATE OR REPLACE FUNCTION public.anabranch_need_read_committed(operation text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
  IF current_setting('transaction_isolation') IN ('read committed', 'read uncommitted')
     OR operation = 'INSERT'
     OR operation <> 'UPDATE' AND EXISTS (
       SELECT FROM pg_constraint k
       WHERE k.contype = 'f' AND k.conrelid = 'public.document_chunks'::regclass
         AND k.confrelid = 'public.documents'::regclass) THEN
    RETURN;
  END IF;
  RAISE EXCEPTION 'a document''s grants and metadata can be written in READ COMMITTED only'
    USING ERRCODE = 'feature_not_supported',
          DETAIL = 'This transaction''s snapshot may lack chunks that were added since, and they would not follow.',
          HINT = 'BEGIN ISOLATION LEVEL READ COMMITTED';
END
$$;

-- A document's access set changed, or the document came or went: its chunks follow.
CREATE OR REPLACE FUNCTION public.anabranch_document_changed() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
  PERFORM public.anabranch_need_read_committed(TG_OP);
  IF TG_OP = 'TRUNCATE' THEN
    UPDATE public.document_chunks c SET access_set_id = NULL WHERE c.access_set_id IS NOT NULL;
    PERFORM public.anabranch_discard_access_set(s.id) FROM public.access_sets s;
    RETURN NULL;
  END IF;
  IF TG_OP <> 'INSERT' AND (TG_OP = 'DELETE' OR NEW.id <> OLD.id) THEN
    UPDATE public.document_chunks c SET access_set_id = NULL
    WHERE c.document_id = OLD.id AND c.access_set_id IS NOT NULL;
  END IF;
  IF TG_OP <> 'DELETE' THEN
    UPDATE public.document_chunks c SET access_set_id = NEW.access_set_id
    WHERE c.document_id = NEW.id AND c.access_set_id IS DISTINCT FROM NEW.access_set_id;
  END IF;
  IF TG_OP <> 'INSERT' AND OLD.access_set_id IS NOT NULL THEN
    PERFORM public.anabranch_discard_access_set(OLD.access_set_id);
  END IF;
  RETURN NULL;
END
$$;

-- A document's metadata changed, or it came or went with some: what is derived of its chunks' follows.
CREATE OR REPLACE FUNCTION public.anabranch_document_described() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  touched uuid[];
BEGIN
  PERFORM public.anabranch_need_read_committed(TG_OP);
  IF TG_OP = 'TRUNCATE' THEN
    SELECT array_agg(c.id) INTO touched FROM public.document_chunks c;
  ELSE
    -- Locked against being deleted meanwhile: entries of a chunk that is gone would stay.
    SELECT array_agg(c.id) INTO touched
    FROM (SELECT its.id FROM public.document_chunks its
          WHERE its.document_id = OLD.id OR its.document_id = NEW.id
          ORDER BY its.id
          FOR KEY SHARE) c;
  END IF;
  IF touched IS NOT NULL THEN
    PERFORM public.anabranch_derive_metadata(touched);
  END IF;
  RETURN NULL;
END
$$;

-- A chunk is written, moved or described: it takes over its document's access set, whatever it was given.
CREATE OR REPLACE FUNCTION public.anabranch_chunk_written() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
  IF TG_OP = 'UPDATE' AND OLD.document_id IS DISTINCT FROM NEW.document_id THEN
    -- The document that it leaves, too: a change of that one's metadata would still find the chunk there.
    PERFORM FROM public.documents d WHERE d.id IN (OLD.document_id, NEW.document_id) ORDER BY d.id FOR SHARE;
  END IF;
  -- The lock is what keeps a revocation that is under way from being missed.
  SELECT d.access_set_id INTO NEW.access_set_id
  FROM public.documents d
  WHERE d.id = NEW.document_id
  FOR SHARE;
  RETURN NEW;
END
$$;

-- A chunk's topics, session or access set changed, or the chunk came or went: chunk_topics follows.
CREATE OR REPLACE FUNCTION public.anabranch_chunk_changed() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
  IF TG_OP = 'TRUNCATE' THEN
    TRUNCATE public.chunk_topics;
    RETURN NULL;
  END IF;
  IF TG_OP <> 'INSERT' THEN
    DELETE FROM public.chunk_topics t WHERE t.chunk_id = OLD.id;
  END IF;
  IF TG_OP <> 'DELETE' THEN
    INSERT INTO public.chunk_topics (topic_id, chunk_id, session_id, access_set_id)
    SELECT DISTINCT r.topic_id, NEW.id, NEW.session_id, NEW.access_set_id
    FROM unnest(NEW.related_topic_ids) AS r (topic_id)
    WHERE r.topic_id IS NOT NULL;
  END IF;
  RETURN NULL;
END
$$;

-- A chunk's metadata changed, or what it is read with, or the chunk came or went: chunk_metadata follows.
CREATE OR REPLACE FUNCTION public.anabranch_chunk_described() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
  IF TG_OP = 'TRUNCATE' THEN
    TRUNCATE public.chunk_metadata;
  ELSIF TG_OP = 'UPDATE' AND NEW.id = OLD.id AND NEW.document_id IS NOT DISTINCT FROM OLD.document_id
        AND NEW.metadata IS NOT DISTINCT FROM OLD.metadata THEN
    UPDATE public.chunk_metadata m SET access_set_id = NEW.access_set_id WHERE m.chunk_id = NEW.id;
  ELSE
    IF TG_OP <> 'INSERT' THEN
      IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        -- Entries that were made since are not in the snapshot, and would stay. Whoever made them has written the
        -- document, so this fails then.
        PERFORM FROM public.documents d WHERE d.id = OLD.document_id FOR SHARE;
      END IF;
      DELETE FROM public.chunk_metadata m WHERE m.chunk_id = OLD.id;
    END IF;
    IF TG_OP <> 'DELETE' THEN
      INSERT INTO public.chunk_metadata (entry, chunk_id, access_set_id)
      SELECT e.entry, NEW.id, NEW.access_set_id
      FROM public.anabranch_metadata_entries(
        (SELECT d.metadata FROM public.documents d WHERE d.id = NEW.document_id), NEW.metadata) AS e (entry);
    END IF;
  END IF;
  RETURN NULL;
END
$$;

CREATE OR REPLACE TRIGGER anabranch_grants_inserted AFTER INSERT ON public.document_grants
  REFERENCING NEW TABLE AS new_grants
  FOR EACH STATEMENT EXECUTE FUNCTION public.anabranch_grants_changed();
CREATE OR REPLACE TRIGGER anabranch_grants_updated AFTER UPDATE ON public.document_grants
  REFERENCING OLD TABLE AS old_grants NEW TABLE AS new_grants
  FOR EACH STATEMENT EXECUTE FUNCTION public.anabranch_grants_changed();
CREATE OR REPLACE TRIGGER anabranch_grants_deleted AFTER DELETE ON public.document_grants
  REFERENCING OLD TABLE AS old_grants
  FOR EACH STATEMENT EXECUTE FUNCTION public.anabranch_grants_changed();
CREATE OR REPLACE TRIGGER anabranch_grants_truncated AFTER TRUNCATE ON public.document_grants
  FOR EACH STATEMENT EXECUTE FUNCTION public.anabranch_grants_changed();

-- The conditions keep an ordinary update (a title, a text, an embedding) from paying for any of this.
CREATE OR REPLACE TRIGGER anabranch_document_inserting BEFORE INSERT ON public.documents
  FOR EACH ROW EXECUTE FUNCTION public.anabranch_document_written();
CREATE OR REPLACE TRIGGER anabranch_document_updating BEFORE UPDATE ON public.documents
  FOR EACH ROW WHEN (new.id <> old.id OR new.access_set_id IS DISTINCT FROM old.access_set_id)
  EXECUTE FUNCTION public.anabranch_document_written();
CREATE OR REPLACE TRIGGER anabranch_document_inserted AFTER INSERT ON public.documents
  FOR EACH ROW WHEN (new.access_set_id IS NOT NULL)
  EXECUTE FUNCTION public.anabranch_document_changed();
CREATE OR REPLACE TRIGGER anabranch_document_updated AFTER UPDATE ON public.documents
  FOR EACH ROW WHEN (new.id <> old.id OR new.access_set_id IS DISTINCT FROM old.access_set_id)
  EXECUTE FUNCTION public.anabranch_document_changed();
CREATE OR REPLACE TRIGGER anabranch_document_deleted AFTER DELETE ON public.documents
  FOR EACH ROW EXECUTE FUNCTION public.anabranch_document_changed();
CREATE OR REPLACE TRIGGER anabranch_document_truncated AFTER TRUNCATE ON public.documents
  FOR EACH STATEMENT EXECUTE FUNCTION public.anabranch_document_changed();

CREATE OR REPLACE TRIGGER anabranch_document_described_inserted AFTER INSERT ON public.documents
  FOR EACH ROW WHEN (new.metadata <> '{}'::jsonb)
  EXECUTE FUNCTION public.anabranch_document_described();
CREATE OR REPLACE TRIGGER anabranch_document_described_updated AFTER UPDATE ON public.documents
  FOR EACH ROW WHEN (new.id <> old.id OR new.metadata IS DISTINCT FROM old.metadata)
  EXECUTE FUNCTION public.anabranch_document_described();
CREATE OR REPLACE TRIGGER anabranch_document_described_deleted AFTER DELETE ON public.documents
  FOR EACH ROW WHEN (old.metadata <> '{}'::jsonb)
  EXECUTE FUNCTION public.anabranch_document_described();
CREATE OR REPLACE TRIGGER anabranch_document_described_truncated AFTER TRUNCATE ON public.documents
  FOR EACH STATEMENT EXECUTE FUNCTION public.anabranch_document_described();

CREATE OR REPLACE TRIGGER anabranch_chunk_inserting BEFORE INSERT ON public.document_chunks
  FOR EACH ROW EXECUTE FUNCTION public.anabranch_chunk_written();
CREATE OR REPLACE TRIGGER anabranch_chunk_updating BEFORE UPDATE ON public.document_chunks
  FOR EACH ROW WHEN (new.document_id IS DISTINCT FROM old.document_id
    OR new.metadata IS DISTINCT FROM old.metadata
    OR new.access_set_id IS DISTINCT FROM old.access_set_id)
  EXECUTE FUNCTION public.anabranch_chunk_written();
CREATE OR REPLACE TRIGGER anabranch_chunk_inserted AFTER INSERT ON public.document_chunks
  FOR EACH ROW WHEN (new.related_topic_ids <> '{}'::uuid[])
  EXECUTE FUNCTION public.anabranch_chunk_changed();
CREATE OR REPLACE TRIGGER anabranch_chunk_updated AFTER UPDATE ON public.document_chunks
  FOR EACH ROW WHEN (new.id <> old.id
    OR new.related_topic_ids IS DISTINCT FROM old.related_topic_ids
    OR new.session_id IS DISTINCT FROM old.session_id
    OR new.access_set_id IS DISTINCT FROM old.access_set_id)
  EXECUTE FUNCTION public.anabranch_chunk_changed();
CREATE OR REPLACE TRIGGER anabranch_chunk_deleted AFTER DELETE ON public.document_chunks
  FOR EACH ROW WHEN (old.related_topic_ids <> '{}'::uuid[])
  EXECUTE FUNCTION public.anabranch_chunk_changed();
CREATE OR REPLACE TRIGGER anabranch_chunk_truncated AFTER TRUNCATE ON public.document_chunks
  FOR EACH STATEMENT EXECUTE FUNCTION public.anabranch_chunk_changed();

CREATE OR REPLACE TRIGGER anabranch_chunk_described_inserted AFTER INSERT ON public.document_chunks
  FOR EACH ROW EXECUTE FUNCTION public.anabranch_chunk_described();
CREATE OR REPLACE TRIGGER anabranch_chunk_described_updated AFTER UPDATE ON public.document_chunks
  FOR EACH ROW WHEN (new.id <> old.id
    OR new.document_id IS DISTINCT FROM old.document_id
    OR new.metadata IS DISTINCT FROM old.metadata
    OR new.access_set_id IS DISTINCT FROM old.access_set_id)
  EXECUTE FUNCTION public.anabranch_chunk_described();
CREATE OR REPLACE TRIGGER anabranch_chunk_described_deleted AFTER DELETE ON public.document_chunks
  FOR EACH ROW EXECUTE FUNCTION public.anabranch_chunk_described();
CREATE OR REPLACE TRIGGER anabranch_chunk_described_truncated AFTER TRUNCATE ON public.document_chunks
  FOR EACH STATEMENT EXECUTE FUNCTION public.anabranch_chunk_described();

-- What is wrong with the derived data, by the plain rule; empty as long as every write went through the triggers.
CREATE OR REPLACE FUNCTION public.anabranch_wrong_documents() RETURNS TABLE (id uuid)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
  SELECT d.id
  FROM public.documents d
  LEFT JOIN public.access_sets s ON s.id = d.access_set_id
  LEFT JOIN (
    SELECT g.document_id,
           array_agg(DISTINCT g.principal::text COLLATE "C" ORDER BY g.principal::text COLLATE "C") AS principals
    FROM public.document_grants g
    GROUP BY g.document_id
  ) truth ON truth.document_id = d.id
  WHERE s.principals IS DISTINCT FROM truth.principals
$$;

CREATE OR REPLACE FUNCTION public.anabranch_wrong_chunks() RETURNS TABLE (id uuid)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
  SELECT c.id
  FROM public.document_chunks c
  LEFT JOIN public.documents d ON d.id = c.document_id
  WHERE c.access_set_id IS DISTINCT FROM d.access_set_id
$$;

CREATE OR REPLACE FUNCTION public.anabranch_wrong_topics() RETURNS TABLE (chunk_id uuid)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
  SELECT coalesce(t.chunk_id, truth.chunk_id)
  FROM public.chunk_topics t
  FULL JOIN (
    SELECT DISTINCT r.topic_id, c.id AS chunk_id, c.session_id, c.access_set_id
    FROM public.document_chunks c, unnest(c.related_topic_ids) AS r (topic_id)
    WHERE r.topic_id IS NOT NULL
  ) truth ON truth.topic_id = t.topic_id AND truth.chunk_id = t.chunk_id
  WHERE t.chunk_id IS NULL OR truth.chunk_id IS NULL
     OR t.session_id IS DISTINCT FROM truth.session_id
     OR t.access_set_id IS DISTINCT FROM truth.access_set_id
$$;

CREATE OR REPLACE FUNCTION public.anabranch_wrong_metadata() RETURNS TABLE (chunk_id uuid)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
  SELECT coalesce(m.chunk_id, truth.chunk_id)
  FROM public.chunk_metadata m
  FULL JOIN (
    SELECT e.entry, c.id AS chunk_id, c.access_set_id
    FROM public.document_chunks c
    LEFT JOIN public.documents d ON d.id = c.document_id
    CROSS JOIN LATERAL public.anabranch_metadata_entries(d.metadata, c.metadata) AS e (entry)
  ) truth ON truth.entry = m.entry AND truth.chunk_id = m.chunk_id
  WHERE m.chunk_id IS NULL OR truth.chunk_id IS NULL
     OR m.access_set_id IS DISTINCT FROM truth.access_set_id
$$;

-- Derives everything anew where it is wrong, and says how many rows were: for rows that were there before the
-- triggers, and for writes that went past them (a restore with triggers disabled, logical replication).
CREATE OR REPLACE FUNCTION public.anabranch_derive_anew(
  OUT documents bigint, OUT chunks bigint, OUT topics bigint, OUT metadata bigint, OUT sets bigint) RETURNS record
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  wrong uuid[];
  removed bigint;
BEGIN
  documents := 0;
  chunks := 0;
  topics := 0;
  metadata := 0;
  sets := 0;
  -- First without a lock: most of the time there is nothing to do.
  IF NOT EXISTS (SELECT FROM public.anabranch_wrong_documents())
     AND NOT EXISTS (SELECT FROM public.anabranch_wrong_chunks())
     AND NOT EXISTS (SELECT FROM public.anabranch_wrong_topics())
     AND NOT EXISTS (SELECT FROM public.anabranch_wrong_metadata())
     AND NOT EXISTS (SELECT FROM public.access_sets s
                     WHERE NOT EXISTS (SELECT FROM public.documents d WHERE d.access_set_id = s.id)) THEN
    RETURN;
  END IF;
  LOCK TABLE public.documents, public.document_chunks, public.document_grants IN SHARE ROW EXCLUSIVE MODE;
  SELECT array_agg(w.id) INTO wrong FROM public.anabranch_wrong_documents() w;
  UPDATE public.documents d SET access_set_id = public.anabranch_access_set(d.id) WHERE d.id = ANY (wrong);
  GET DIAGNOSTICS documents = ROW_COUNT;
  SELECT array_agg(w.id) INTO wrong FROM public.anabranch_wrong_chunks() w;
  UPDATE public.document_chunks c
  SET access_set_id = (SELECT d.access_set_id FROM public.documents d WHERE d.id = c.document_id)
  WHERE c.id = ANY (wrong);
  GET DIAGNOSTICS chunks = ROW_COUNT;
  SELECT array_agg(DISTINCT w.chunk_id) INTO wrong FROM public.anabranch_wrong_topics() w;
  DELETE FROM public.chunk_topics t WHERE t.chunk_id = ANY (wrong);
  INSERT INTO public.chunk_topics (topic_id, chunk_id, session_id, access_set_id)
  SELECT DISTINCT r.topic_id, c.id, c.session_id, c.access_set_id
  FROM public.document_chunks c, unnest(c.related_topic_ids) AS r (topic_id)
  WHERE c.id = ANY (wrong) AND r.topic_id IS NOT NULL;
  topics := coalesce(cardinality(wrong), 0);
  SELECT array_agg(DISTINCT w.chunk_id) INTO wrong FROM public.anabranch_wrong_metadata() w;
  PERFORM public.anabranch_derive_metadata(wrong);
  metadata := coalesce(cardinality(wrong), 0);
  SELECT count(*) INTO sets FROM public.access_sets;
  PERFORM public.anabranch_discard_access_set(s.id) FROM public.access_sets s;
  SELECT count(*) INTO removed FROM public.access_sets;
  sets := sets - removed;
END
$$;

-- None of them is for anybody but the owner; a trigger needs no right to be run.
REVOKE ALL ON FUNCTION
  public.anabranch_access_set(uuid), public.anabranch_discard_access_set(bigint),
  public.anabranch_grants_changed(), public.anabranch_document_written(), public.anabranch_document_changed(),
  public.anabranch_chunk_written(), public.anabranch_chunk_changed(),
  public.anabranch_metadata_entries(jsonb, jsonb), public.anabranch_derive_metadata(uuid[]),
  public.anabranch_need_read_committed(text),
  public.anabranch_document_described(), public.anabranch_chunk_described(),
  public.anabranch_wrong_documents(), public.anabranch_wrong_chunks(), public.anabranch_wrong_topics(),
  public.anabranch_wrong_metadata(), public.anabranch_derive_anew()
  FROM PUBLIC;

-- Who sees which row. The asker's principals are in the setting :principals_setting, as a JSON array, for the length
-- of a transaction. Unset, or '' as a pooled connection shows it afterwards, or anything but an array with a string
-- in it: no row at all, not even a public one.
--
-- Policies are written as PostgreSQL itself prints them, so that `migrate` and `check` can compare.

-- Forced: the owner is held to the policies as well, and everything below names whom it lets in.
ALTER TABLE public.access_sets ENABLE ROW LEVEL SECURITY;
ALTER TABLE public.access_sets FORCE ROW LEVEL SECURITY;
ALTER TABLE public.documents ENABLE ROW LEVEL SECURITY;
ALTER TABLE public.documents FORCE ROW LEVEL SECURITY;
ALTER TABLE public.document_chunks ENABLE ROW LEVEL SECURITY;
ALTER TABLE public.document_chunks FORCE ROW LEVEL SECURITY;
ALTER TABLE public.document_grants ENABLE ROW LEVEL SECURITY;
ALTER TABLE public.document_grants FORCE ROW LEVEL SECURITY;
ALTER TABLE public.chunk_topics ENABLE ROW LEVEL SECURITY;
ALTER TABLE public.chunk_topics FORCE ROW LEVEL SECURITY;
ALTER TABLE public.chunk_metadata ENABLE ROW LEVEL SECURITY;
ALTER TABLE public.chunk_metadata FORCE ROW LEVEL SECURITY;

-- The one place where the asker is looked at. No column of the row occurs in the inner query, so it is run once a
-- statement (an InitPlan). HAVING: without a string there is no array, and `&& NULL` lets nothing through.
CREATE POLICY anabranch_reader_access_sets ON public.access_sets FOR SELECT TO anabranch_reader
  USING ((principals && ( SELECT array_append(array_agg((e.value #>> '{}'::text[])), 'public'::text) AS array_append
   FROM jsonb_array_elements((NULLIF(current_setting(:'principals_setting'::text, true), ''::text))::jsonb) e(value)
  WHERE (jsonb_typeof(e.value) = 'string'::text)
 HAVING (count(*) > 0))));

-- The inner query is held to the policy above: these are the sets that the asker belongs to, read once a statement.
-- IN, not ANY: hashed, so that a row costs the same for an asker of thousands of sets as for one of ten. And no index
-- serves it: the planner takes every asker for one of ten sets, and for one of thousands would read the whole table
-- through that index, where the vectors' index finds the nearest in no time.
CREATE POLICY anabranch_reader_documents ON public.documents FOR SELECT TO anabranch_reader
  USING ((access_set_id IN ( SELECT access_sets.id
   FROM access_sets)));
CREATE POLICY anabranch_reader_document_chunks ON public.document_chunks FOR SELECT TO anabranch_reader
  USING ((access_set_id IN ( SELECT access_sets.id
   FROM access_sets)));
CREATE POLICY anabranch_reader_chunk_topics ON public.chunk_topics FOR SELECT TO anabranch_reader
  USING ((access_set_id IN ( SELECT access_sets.id
   FROM access_sets)));
CREATE POLICY anabranch_reader_chunk_metadata ON public.chunk_metadata FOR SELECT TO anabranch_reader
  USING ((access_set_id IN ( SELECT access_sets.id
   FROM access_sets)));

-- Ingestion: all of the truth, none of what is derived from it but to look at.
CREATE POLICY anabranch_writer_documents ON public.documents FOR ALL TO anabranch_writer
  USING (true) WITH CHECK (true);
CREATE POLICY anabranch_writer_document_chunks ON public.document_chunks FOR ALL TO anabranch_writer
  USING (true) WITH CHECK (true);
CREATE POLICY anabranch_writer_document_grants ON public.document_grants FOR ALL TO anabranch_writer
  USING (true) WITH CHECK (true);
CREATE POLICY anabranch_writer_access_sets ON public.access_sets FOR SELECT TO anabranch_writer
  USING (true);
CREATE POLICY anabranch_writer_chunk_topics ON public.chunk_topics FOR SELECT TO anabranch_writer
  USING (true);
CREATE POLICY anabranch_writer_chunk_metadata ON public.chunk_metadata FOR SELECT TO anabranch_writer
  USING (true);

-- The owner: the triggers run as it. Without these policies they would find no row, and revoke nothing.
CREATE POLICY anabranch_owner_documents ON public.documents FOR ALL TO CURRENT_USER
  USING (true) WITH CHECK (true);
CREATE POLICY anabranch_owner_document_chunks ON public.document_chunks FOR ALL TO CURRENT_USER
  USING (true) WITH CHECK (true);
CREATE POLICY anabranch_owner_document_grants ON public.document_grants FOR ALL TO CURRENT_USER
  USING (true) WITH CHECK (true);
CREATE POLICY anabranch_owner_access_sets ON public.access_sets FOR ALL TO CURRENT_USER
  USING (true) WITH CHECK (true);
CREATE POLICY anabranch_owner_chunk_topics ON public.chunk_topics FOR ALL TO CURRENT_USER
  USING (true) WITH CHECK (true);
CREATE POLICY anabranch_owner_chunk_metadata ON public.chunk_metadata FOR ALL TO CURRENT_USER
  USING (true) WITH CHECK (true);

GRANT USAGE ON SCHEMA public TO anabranch_reader, anabranch_writer;

-- A worker: what it searches and shows. Not the grants, and not who else is in a set that its asker is in.
GRANT SELECT (id, session_id, title, source_url, file_description, document_type, metadata, access_set_id)
  ON public.documents TO anabranch_reader;
GRANT SELECT (id, document_id, session_id, parent_chunk_id, related_topic_ids, chunk_type, chunk_position, text_content,
              token_count, page, section, coordinates, metadata, embedding, access_set_id)
  ON public.document_chunks TO anabranch_reader;
GRANT SELECT (topic_id, chunk_id, session_id, access_set_id) ON public.chunk_topics TO anabranch_reader;
GRANT SELECT (entry, chunk_id, access_set_id) ON public.chunk_metadata TO anabranch_reader;
GRANT SELECT (id) ON public.access_sets TO anabranch_reader;

GRANT SELECT, INSERT, UPDATE, DELETE ON public.documents, public.document_chunks, public.document_grants
  TO anabranch_writer;
GRANT SELECT ON public.access_sets, public.chunk_topics, public.chunk_metadata TO anabranch_writer;

-- Rows that were there before the triggers, or were written past them.
SELECT documents, chunks, topics, metadata, sets FROM public.anabranch_derive_anew();

-- What searches need to be fast. An index of the same definition under another name is as good, and is left alone:
-- on a big store, build the HNSW index beforehand with CREATE INDEX CONCURRENTLY and a large maintenance_work_mem.

-- Nearest neighbours by cosine distance. On 50,000 vectors with many near one another, a search that looks at 200
-- candidates finds 98.9 % of the 15 nearest with pgvector's ef_construction of 64 (one query only a third of them), and
-- all of them with 200; the build takes 2.5 times as long.
CREATE INDEX IF NOT EXISTS document_chunks_embedding ON public.document_chunks USING hnsw (embedding vector_cosine_ops) WITH (ef_construction = 200);

-- A session's chunks; the readers of few rows; a document's chunks are in 002_derived.sql.
CREATE INDEX IF NOT EXISTS document_chunks_session_id ON public.document_chunks USING btree (session_id);
CREATE INDEX IF NOT EXISTS document_chunks_access_set_id ON public.document_chunks USING btree (access_set_id);
CREATE INDEX IF NOT EXISTS documents_session_id ON public.documents USING btree (session_id);

-- The local arm and filters on metadata: chunk_topics and chunk_metadata are read by their primary keys.

-- What events filter by.
CREATE INDEX IF NOT EXISTS document_chunks_section ON public.document_chunks USING btree (section);
CREATE INDEX IF NOT EXISTS documents_document_type ON public.documents USING btree (document_type);

-- `source_url ^@ prefix` is leakproof, and an index serves it in this collation only.
CREATE INDEX IF NOT EXISTS documents_source_url ON public.documents USING btree (source_url COLLATE "C");

-- The sets that somebody is in.
CREATE INDEX IF NOT EXISTS access_sets_principals ON public.access_sets USING gin (principals);

-- For back ends and operators: row-level security keeps a worker from using these (`@>` is not leakproof).
CREATE INDEX IF NOT EXISTS document_chunks_related_topic_ids ON public.document_chunks USING gin (related_topic_ids);
CREATE INDEX IF NOT EXISTS document_chunks_metadata ON public.document_chunks USING gin (metadata);
CREATE INDEX IF NOT EXISTS documents_metadata ON public.documents USING gin (metadata);

ANALYZE public.documents, public.document_chunks, public.document_grants, public.access_sets, public.chunk_topics, public.chunk_metadata;

