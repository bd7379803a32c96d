-- Who sees which row. The requesting principals are in the setting :principals_setting, as a JSON array, for the duration
-- of a transaction. If it is unset, or '' (its value on a pooled connection afterwards), or not an array with at least
-- one string, no rows are visible, not even public ones.
--
-- Policies are written as PostgreSQL prints them, so that `migrate` and `check` can compare them. Every operator and
-- function is qualified with its schema: otherwise one with the same name and better matching argument types in schema
-- public would be used.

-- The only place that evaluates the requesting principals. The subquery does not refer to the row, so it runs once per
-- statement (as an InitPlan). HAVING: without a string there is no array, and `&& NULL` matches nothing.
CREATE POLICY anabranch_reader_access_sets ON public.access_sets FOR SELECT TO anabranch_reader
  USING ((principals OPERATOR(pg_catalog.&&) ( SELECT pg_catalog.array_append(pg_catalog.array_agg((e.value OPERATOR(pg_catalog.#>>) '{}'::text[])), 'public'::text) AS array_append
   FROM pg_catalog.jsonb_array_elements((NULLIF(pg_catalog.current_setting(:'principals_setting'::text, true), ''::text))::jsonb) e(value)
  WHERE (pg_catalog.jsonb_typeof(e.value) OPERATOR(pg_catalog.=) 'string'::text)
 HAVING (pg_catalog.count(*) OPERATOR(pg_catalog.>) 0))));

-- The policy above applies to the subquery: it returns the sets with a requesting principal, once per statement. IN, not
-- ANY: it is hashed, so that a row costs the same for thousands of sets as for ten. And it must not be able to use an
-- index: the planner estimates ten sets for every caller, so for a caller with thousands it would read the whole table
-- through that index, although the vector index finds the nearest rows much faster.
CREATE POLICY anabranch_reader_documents ON public.documents FOR SELECT TO anabranch_reader
  USING ((access_set_id IN ( SELECT access_sets.id
   FROM public.access_sets)));
CREATE POLICY anabranch_reader_document_chunks ON public.document_chunks FOR SELECT TO anabranch_reader
  USING ((access_set_id IN ( SELECT access_sets.id
   FROM public.access_sets)));
CREATE POLICY anabranch_reader_chunk_topics ON public.chunk_topics FOR SELECT TO anabranch_reader
  USING ((access_set_id IN ( SELECT access_sets.id
   FROM public.access_sets)));
CREATE POLICY anabranch_reader_chunk_metadata ON public.chunk_metadata FOR SELECT TO anabranch_reader
  USING ((access_set_id IN ( SELECT access_sets.id
   FROM public.access_sets)));

-- Ingestion: read and write all source data, only read derived data.
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

-- The owner, as which the triggers run. Without these policies they would find no rows and not revoke anything.
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

-- Rows written before the triggers existed, or without firing them.
SELECT documents, chunks, topics, metadata, sets FROM public.anabranch_rebuild_derived();
