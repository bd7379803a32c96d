-- The store's tables. If a back end already has them, they are kept, and only missing columns are added.
--
-- These files are plain SQL, applied in order by `anabranch migrate`, or by hand in one transaction:
--   psql --single-transaction -v principals_setting=anabranch.principals -v vector_schema=public \
--     -f 001_tables.sql -f 002_derived.sql …
-- `migrate` skips each statement whose object already exists, and applies the others with short locks, in a different
-- order. Apply them by hand only to a new store: an upgrade may also need a step from steps/.
-- For embeddings with other dimensions, `migrate` replaces 768: docs/embedding-model.md.
-- A statement ends with a semicolon at the end of a line, outside $$ … $$.

CREATE TABLE IF NOT EXISTS public.documents (
  id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
  session_id uuid,
  title text,
  source_url text,
  file_description text,
  document_type text,
  metadata jsonb DEFAULT '{}'
);

-- A parent may be missing (results then report it), so parent_chunk_id has no foreign key.
-- A chunk without an embedding, for example the parent of problems, is never searched.
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

-- Who may read which document: the source of all access control. `public` means everybody.
CREATE TABLE IF NOT EXISTS public.document_grants (
  document_id uuid NOT NULL REFERENCES public.documents ON DELETE CASCADE,
  principal text NOT NULL,
  PRIMARY KEY (document_id, principal)
);

-- Existing tables may lack a column.
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

-- By default, 3 KiB vectors would be stored out of line (TOAST) and fetched one by one: exact scans would be 3.5 times
-- slower, HNSW 1.7 times. Existing rows stay out of line until the table is rewritten (VACUUM FULL).
ALTER TABLE public.document_chunks ALTER COLUMN embedding SET STORAGE PLAIN;
