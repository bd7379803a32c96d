-- Removes the functions that only version 2's workers, or its triggers, call.
DROP FUNCTION IF EXISTS
  public.anabranch_search(
    text, vector, uuid, uuid, text, text, text, text[], int, boolean, int, int, boolean, int, int),
  public.anabranch_search_passages(
    text, vector, uuid, uuid, text, text, text, text[], int, int, int, boolean, int, int),
  public.anabranch_search_exactly(text, vector, uuid, uuid, text, text, text, text[], int),
  public.anabranch_search_index(boolean, vector, uuid, uuid, text, text, text, text[], int),
  public.anabranch_scope_size(text, uuid, uuid, text, text, text, text[], int),
  public.anabranch_filtered_scope(uuid, uuid, text, text, text, text[]),
  public.anabranch_act_as(text, int, text),
  public.anabranch_has_metadata(jsonb, jsonb, text[]),
  public.anabranch_metadata_entries(jsonb, jsonb);
