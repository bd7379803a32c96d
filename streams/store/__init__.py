"""The PostgreSQL store: searches, its schema, and what a worker demands of it."""
