-- Removes what version 1's workers need; all of them must have been upgraded. Triggers are dropped with their functions.
DROP FUNCTION IF EXISTS
  public.anabranch_grants_changed(),
  public.anabranch_document_written(), public.anabranch_document_changed(), public.anabranch_document_described(),
  public.anabranch_chunk_written(), public.anabranch_chunk_changed(), public.anabranch_chunk_described()
  CASCADE;
DROP FUNCTION IF EXISTS
  public.anabranch_derive_metadata(uuid[]), public.anabranch_need_read_committed(text),
  public.anabranch_wrong_documents(), public.anabranch_wrong_chunks(), public.anabranch_wrong_topics(),
  public.anabranch_wrong_metadata(), public.anabranch_derive_anew();
-- Indexes that the searches of version 2 replaced by others; a back end's own with one of these names is kept.
DO $$
DECLARE
  replaced regclass;
BEGIN
  FOR replaced IN
    SELECT i.indexrelid
    FROM pg_catalog.pg_index i
    WHERE i.indrelid OPERATOR(pg_catalog.=) 'public.document_chunks'::regclass
      AND pg_catalog.replace(pg_catalog.pg_get_indexdef(i.indexrelid), ' ON ONLY ', ' ON ') OPERATOR(pg_catalog.=) ANY (ARRAY[
        'CREATE INDEX document_chunks_session_id ON public.document_chunks USING btree (session_id)',
        'CREATE INDEX document_chunks_access_set_id ON public.document_chunks USING btree (access_set_id)'])
  LOOP
    EXECUTE pg_catalog.format('DROP INDEX %s', replaced);
  END LOOP;
END
$$;
