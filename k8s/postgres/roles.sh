#!/bin/sh
# Runs owner.sql and roles.sql with passwords from files: for each NAME of PGPASSWORD, OWNER_PASSWORD, WORKER_PASSWORD,
# INGESTION_PASSWORD and MONITORING_PASSWORD, NAME_FILE is the path of a file with that password. libpq's other variables
# (PGHOST, PGUSER, PGDATABASE) name the server and a superuser. Arguments are passed to psql.
set -eu

for name in PGPASSWORD OWNER_PASSWORD WORKER_PASSWORD INGESTION_PASSWORD MONITORING_PASSWORD; do
    eval "file=\${${name}_FILE:-}"
    if [ -n "$file" ]; then
        password=$(cat "$file")
        export "$name=$password"
    fi
done

here=$(dirname "$0")
exec psql --no-psqlrc --set=ON_ERROR_STOP=1 --file="$here/owner.sql" --file="$here/roles.sql" "$@"
