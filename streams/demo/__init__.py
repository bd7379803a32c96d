"""The demo: the real worker on an embedded broker and database, answering real questions."""
