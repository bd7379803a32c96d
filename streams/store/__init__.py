"""The PostgreSQL store: searches, the schema, and the checks before a worker starts."""
