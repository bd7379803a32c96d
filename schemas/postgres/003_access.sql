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
