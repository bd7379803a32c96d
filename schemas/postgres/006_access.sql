-- The last step: row-level security first, then the rights, so that nobody can read a table before it is protected.

-- Forced: the policies also apply to the owner.
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

GRANT USAGE ON SCHEMA public TO anabranch_reader, anabranch_writer;

-- Workers: what they search and return. Not the grants, and not the other principals in the caller's access sets.
GRANT SELECT (id, session_id, title, source_url, file_description, document_type, metadata, access_set_id)
  ON public.documents TO anabranch_reader;
GRANT SELECT (id, document_id, session_id, parent_chunk_id, related_topic_ids, chunk_type, chunk_position, text_content,
              token_count, page, section, coordinates, metadata, embedding, access_set_id)
  ON public.document_chunks TO anabranch_reader;
GRANT SELECT (topic_id, chunk_id, session_id, access_set_id) ON public.chunk_topics TO anabranch_reader;
GRANT SELECT (entry, chunk_id, access_set_id, number, instant) ON public.chunk_metadata TO anabranch_reader;
GRANT SELECT (id) ON public.access_sets TO anabranch_reader;
-- The functions that searches call, and those that these call, with the worker's rights.
GRANT EXECUTE ON FUNCTION
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
  public.anabranch_set_principals(text, int), public.anabranch_principals_setting(), public.anabranch_require_row_security(),
  public.anabranch_metadata_text(jsonb), public.anabranch_merged_metadata(jsonb, jsonb),
  public.anabranch_metadata_entry(text, text), public.anabranch_element_entry(text, text),
  public.anabranch_range_entry(text)
  TO anabranch_reader;

GRANT SELECT, INSERT, UPDATE, DELETE ON public.documents, public.document_chunks, public.document_grants
  TO anabranch_writer;
GRANT SELECT ON public.access_sets, public.chunk_topics, public.chunk_metadata TO anabranch_writer;
GRANT SELECT ON public.anabranch_schema TO anabranch_reader;

INSERT INTO public.anabranch_schema (version, oldest_worker) VALUES (3, 3) ON CONFLICT DO NOTHING;
