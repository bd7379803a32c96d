-- The login roles beside the NOLOGIN roles that `anabranch migrate` or owner.sql creates. Run by psql, after either, as a
-- superuser or as a role with CREATEROLE that may grant those; as often as you like: a second run sets the passwords again
-- and changes nothing else.
--
-- Anyone who can log in as anabranch_worker (or as any member of anabranch_reader) can claim any principal, and therefore
-- reads every document: the principals are a setting of the session, which the client chooses. Row-level security keeps
-- one caller's rows from another caller only through a worker, which sets the principals of each event. Give this
-- password to workers alone.
--
--   WORKER_PASSWORD=... INGESTION_PASSWORD=... psql --no-psqlrc -v ON_ERROR_STOP=1 -f k8s/postgres/roles.sql "$ADMIN_URI"
--
-- With MONITORING_PASSWORD, it also creates anabranch_monitoring for postgres_exporter: a member of pg_monitor, which reads
-- statistics and settings and no table. Granting that takes a superuser or a role with ADMIN on pg_monitor.
--
-- Passwords come from the environment: on a command line they would show in the process list.

\set ON_ERROR_STOP on
\set QUIET on

\unset worker_password
\unset ingestion_password
\unset monitoring_password
\getenv worker_password WORKER_PASSWORD
\getenv ingestion_password INGESTION_PASSWORD
\getenv monitoring_password MONITORING_PASSWORD

-- An unset variable would become a syntax error that quotes the statement; an empty password would lock the role out.
\if :{?worker_password}
\else
    \set worker_password ''
\endif
\if :{?ingestion_password}
\else
    \set ingestion_password ''
\endif
\if :{?monitoring_password}
\else
    \set monitoring_password ''
\endif

BEGIN;

-- The statements below carry passwords in their text, so they must not reach the server's log. Only a superuser may say
-- so; anyone else sees to it that log_statement is neither ddl nor all.
SELECT current_setting('is_superuser') = 'on' AS superuser \gset
\if :superuser
    SET LOCAL log_statement = 'none';
    SET LOCAL log_min_error_statement = 'panic';
    SET LOCAL log_min_duration_statement = -1;
\endif
-- A second run has nothing to tell.
SET LOCAL client_min_messages = 'warning';

SELECT :'worker_password' = '' OR :'ingestion_password' = '' AS password_missing \gset
\if :password_missing
    DO $$ BEGIN RAISE EXCEPTION 'WORKER_PASSWORD and INGESTION_PASSWORD must both be set'; END $$;
\endif

SELECT 'CREATE ROLE anabranch_worker'
WHERE NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'anabranch_worker') \gexec
SELECT 'CREATE ROLE anabranch_ingestion'
WHERE NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'anabranch_ingestion') \gexec

-- A worker sets an event's principals and reads what these may read. Its login can claim any principal (see above).
ALTER ROLE anabranch_worker LOGIN PASSWORD :'worker_password';
GRANT anabranch_reader TO anabranch_worker;

-- The back end that writes documents, chunks and grants.
ALTER ROLE anabranch_ingestion LOGIN PASSWORD :'ingestion_password';
GRANT anabranch_writer TO anabranch_ingestion;

SELECT :'monitoring_password' <> '' AS monitoring_wanted \gset
\if :monitoring_wanted
    SELECT 'CREATE ROLE anabranch_monitoring'
    WHERE NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'anabranch_monitoring') \gexec
    -- A scrape uses one connection; a limit keeps a hanging exporter from taking those of the workers.
    ALTER ROLE anabranch_monitoring LOGIN CONNECTION LIMIT 5 PASSWORD :'monitoring_password';
    GRANT pg_monitor TO anabranch_monitoring;
\endif

COMMIT;
