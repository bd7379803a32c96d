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
