-- Indexes for fast searches. An existing index with the same definition and another name is equivalent and is kept: on a
-- large store, build the HNSW index beforehand with CREATE INDEX CONCURRENTLY and a large maintenance_work_mem.

-- Nearest neighbours by cosine distance. Half precision: the index is half as large, and finds the same rows; searches take
-- the distances from the full vectors. Normalized first, because halfvec has no room for components above 65,504 or below
-- 6e-8. With ef_construction = 400, a search misses whole dense clusters far less often than with 200. More edges (m) cost
-- more, and find more only with many near copies; docs/performance.md has the tables.
-- A store from an earlier release may keep its index on the full vectors: searches use whichever exists.
CREATE INDEX IF NOT EXISTS document_chunks_embedding_halfvec ON public.document_chunks USING hnsw (((l2_normalize(embedding))::halfvec(768)) halfvec_cosine_ops) WITH (ef_construction = 400);

-- For a session's chunks, and for callers with few readable rows. With the access sets, and without chunks that are never
-- searched, they count a scope under the policies without reading the table. The index for a document's chunks is in
-- 002_derived.sql.
CREATE INDEX IF NOT EXISTS document_chunks_searchable_session ON public.document_chunks USING btree (session_id, access_set_id) WHERE (embedding IS NOT NULL);
CREATE INDEX IF NOT EXISTS document_chunks_searchable_access_set ON public.document_chunks USING btree (access_set_id, session_id) WHERE (embedding IS NOT NULL);
CREATE INDEX IF NOT EXISTS documents_session_id ON public.documents USING btree (session_id);

-- The local arm and filters on metadata: with everything that searches read, so that they do not read the tables.
CREATE INDEX IF NOT EXISTS chunk_topics_searchable ON public.chunk_topics USING btree (topic_id, session_id, chunk_id, access_set_id);
CREATE INDEX IF NOT EXISTS chunk_metadata_searchable ON public.chunk_metadata USING btree (entry, chunk_id, access_set_id);
CREATE INDEX IF NOT EXISTS chunk_metadata_number ON public.chunk_metadata USING btree (entry, number, chunk_id, access_set_id) WHERE (number IS NOT NULL);
CREATE INDEX IF NOT EXISTS chunk_metadata_instant ON public.chunk_metadata USING btree (entry, instant, chunk_id, access_set_id) WHERE (instant IS NOT NULL);

-- The columns that events filter by.
CREATE INDEX IF NOT EXISTS document_chunks_section ON public.document_chunks USING btree (section);
CREATE INDEX IF NOT EXISTS documents_document_type ON public.documents USING btree (document_type);

-- `source_url ^@ prefix` is leakproof, and can use an index only with this collation.
CREATE INDEX IF NOT EXISTS documents_source_url ON public.documents USING btree (source_url COLLATE "C");

-- The access sets that contain a principal.
CREATE INDEX IF NOT EXISTS access_sets_principals ON public.access_sets USING gin (principals);

-- For back ends and operators: workers cannot use these because of row-level security (`@>` is not leakproof).
CREATE INDEX IF NOT EXISTS document_chunks_related_topic_ids ON public.document_chunks USING gin (related_topic_ids);
CREATE INDEX IF NOT EXISTS document_chunks_metadata ON public.document_chunks USING gin (metadata);
CREATE INDEX IF NOT EXISTS documents_metadata ON public.documents USING gin (metadata);

ANALYZE public.documents, public.document_chunks, public.document_grants, public.access_sets, public.chunk_topics, public.chunk_metadata;
