-- What `anabranch migrate` needs and may not do by itself: pgvector, the owner of the tables, and the NOLOGIN roles. Run
-- by psql, once, as a superuser, in the store's database, before `migrate`; as often as you like: a second run sets the
-- owner's password again and changes nothing else.
--
--   OWNER_PASSWORD=... psql --no-psqlrc -v ON_ERROR_STOP=1 -f k8s/postgres/owner.sql "$SUPERUSER_URI"
--
-- The owner is an ordinary role. The triggers on its tables are SECURITY DEFINER: anyone who may write a row runs them with
-- their owner's rights, which must not be a superuser's. After this, no superuser is needed.
--
-- The password comes from the environment: on a command line it would show in the process list.

\set ON_ERROR_STOP on
\set QUIET on

\unset owner_password
\getenv owner_password OWNER_PASSWORD

-- An unset variable would become a syntax error that quotes the statement; an empty password would lock the role out.
\if :{?owner_password}
\else
    \set owner_password ''
\endif

BEGIN;

-- A statement below carries the password in its text, so it must not reach the server's log.
SET LOCAL log_statement = 'none';
SET LOCAL log_min_error_statement = 'panic';
SET LOCAL log_min_duration_statement = -1;
-- A second run has nothing to report.
SET LOCAL client_min_messages = 'warning';

SELECT :'owner_password' = '' AS password_missing \gset
\if :password_missing
    DO $$ BEGIN RAISE EXCEPTION 'OWNER_PASSWORD must be set'; END $$;
\endif

CREATE EXTENSION IF NOT EXISTS vector;

SELECT format('CREATE ROLE %I', name) FROM unnest(ARRAY['anabranch_owner', 'anabranch_reader', 'anabranch_writer']) name
WHERE NOT EXISTS (SELECT FROM pg_roles WHERE rolname = name) \gexec

ALTER ROLE anabranch_owner NOSUPERUSER NOBYPASSRLS NOCREATEROLE NOCREATEDB NOREPLICATION LOGIN PASSWORD :'owner_password';
GRANT USAGE, CREATE ON SCHEMA public TO anabranch_owner;

COMMIT;
