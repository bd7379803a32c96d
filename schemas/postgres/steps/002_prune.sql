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
-- Indexes that the searches of version 2 replaced by others.
DROP INDEX IF EXISTS public.document_chunks_session_id, public.document_chunks_access_set_id;
