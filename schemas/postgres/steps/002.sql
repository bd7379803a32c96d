-- From version 1 to 2, in the transaction that creates version 2's triggers. Workers of version 1 check for the old
-- triggers by name, so these stay until `migrate --prune`, but their functions no longer do anything.
CREATE OR REPLACE FUNCTION public.anabranch_grants_changed() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$ BEGIN RETURN NULL; END $$;
CREATE OR REPLACE FUNCTION public.anabranch_document_written() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$ BEGIN RETURN NEW; END $$;
CREATE OR REPLACE FUNCTION public.anabranch_document_changed() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$ BEGIN RETURN NULL; END $$;
CREATE OR REPLACE FUNCTION public.anabranch_document_described() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$ BEGIN RETURN NULL; END $$;
CREATE OR REPLACE FUNCTION public.anabranch_chunk_written() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$ BEGIN RETURN NEW; END $$;
CREATE OR REPLACE FUNCTION public.anabranch_chunk_changed() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$ BEGIN RETURN NULL; END $$;
CREATE OR REPLACE FUNCTION public.anabranch_chunk_described() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$ BEGIN RETURN NULL; END $$;
