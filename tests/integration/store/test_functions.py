"""Expressions that triggers, verification and searches share are one function each, and cost no more than inline."""

from __future__ import annotations

import asyncio
import json
from hashlib import sha256
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

import pytest

from streams.store import postgres
from streams.store.postgres import PostgresStore
from tests.evaluate.plans import SEARCHES, Asked, _explanation
from tests.integration.connections import connected, execute
from tests.integration.corpora import unit_vectors
from tests.integration.oracle import merged_metadata

if TYPE_CHECKING:
    from tests.conftest import Database

VALUES = [
    '"text"', '""', '"a\\u0001\\"\\\\\\n"', '"ö😀"', '"null"', '"2020"',
    "null", "true", "false", "0", "-1", "2020", "[]", "{}", '["a", 1, null]', '{"b": {"a": "x"}, "aa": 1}',
]  # fmt: skip
LAYERS = ['{"a": 1, "b": "x"}', '{"a": null, "c": []}', "{}", "null", '"text"', "[1]", "3", None]

# Objects that a caller's search_path would find before those of pg_catalog.
TRAP = """
    CREATE SCHEMA trap;
    GRANT USAGE ON SCHEMA trap TO PUBLIC;
    CREATE FUNCTION trap.jsonb_typeof(jsonb) RETURNS text LANGUAGE sql AS $$ SELECT 'string' $$;
    CREATE FUNCTION trap.jsonb_each(jsonb, OUT key text, OUT value jsonb) RETURNS SETOF record LANGUAGE sql
        AS $$ SELECT 'trap', '1'::jsonb $$;
    CREATE FUNCTION trap.sha256(bytea) RETURNS bytea LANGUAGE sql AS $$ SELECT '\\x00'::bytea $$;
    CREATE FUNCTION trap.convert_to(text, name) RETURNS bytea LANGUAGE sql AS $$ SELECT '\\x00'::bytea $$;
    CREATE FUNCTION trap.unnest(uuid[]) RETURNS SETOF uuid LANGUAGE sql AS $$ SELECT NULL::uuid $$;
    CREATE FUNCTION trap.same(text, text) RETURNS boolean LANGUAGE sql AS $$ SELECT false $$;
    CREATE FUNCTION trap.text(jsonb, text[]) RETURNS text LANGUAGE sql AS $$ SELECT 'trap' $$;
    CREATE FUNCTION trap.joined(bytea, bytea) RETURNS bytea LANGUAGE sql AS $$ SELECT $1 $$;
    CREATE FUNCTION trap.joined(jsonb, jsonb) RETURNS jsonb LANGUAGE sql AS $$ SELECT $1 $$;
    CREATE OPERATOR trap.= (LEFTARG = text, RIGHTARG = text, FUNCTION = trap.same);
    CREATE OPERATOR trap.#>> (LEFTARG = jsonb, RIGHTARG = text[], FUNCTION = trap.text);
    CREATE OPERATOR trap.|| (LEFTARG = bytea, RIGHTARG = bytea, FUNCTION = trap.joined);
    CREATE OPERATOR trap.|| (LEFTARG = jsonb, RIGHTARG = jsonb, FUNCTION = trap.joined);
"""
TRAP_TYPES = "CREATE DOMAIN trap.uuid AS text; CREATE DOMAIN trap.text AS int"


def entry(key: str, text: str) -> UUID:
    return UUID(bytes=sha256(f"{key}\0{text}".encode()).digest()[:16])


@pytest.mark.parametrize("path", ["public", "trap, public, pg_catalog"])
async def test_metadata_has_the_form_of_results_whatever_the_search_path(
    database: Database, path: str
) -> None:
    await execute(database.admin, TRAP + TRAP_TYPES)
    async with (
        connected(database.worker, search_path=path) as worker,
        connected(database.owner, search_path=path) as owner,
    ):
        for value in VALUES:
            text = await worker.fetchval("SELECT public.anabranch_metadata_text($1)", value)
            assert {"key": text} == merged_metadata({"key": json.loads(value)})[0]
            assert await worker.fetchval("SELECT public.anabranch_metadata_entry('key', $1)", text) == entry(
                "key", text
            )
        assert await worker.fetchval("SELECT public.anabranch_metadata_text(NULL)") is None
        for document in LAYERS:
            for chunk in LAYERS:
                layers = [json.loads(layer or "null") for layer in (document, chunk)]
                merged = await worker.fetchval(
                    "SELECT public.anabranch_merged_metadata($1, $2)", document, chunk
                )
                assert merged_metadata(json.loads(merged)) == (merged_metadata(*layers)[0], False)
                entries = await owner.fetch(
                    "SELECT e FROM public.anabranch_metadata_entries($1, $2) e", document, chunk
                )
                assert sorted(row[0] for row in entries) == sorted(
                    entry(key, text) for key, text in merged_metadata(*layers)[0].items()
                )


@pytest.mark.parametrize("path", ["public", "trap, public, pg_catalog"])
async def test_topics_and_readers_whatever_the_search_path(database: Database, path: str) -> None:
    await execute(database.admin, TRAP)
    topics = [UUID(int=2), None, UUID(int=1), UUID(int=2)]
    async with connected(database.owner, search_path=path) as owner:
        found = await owner.fetch("SELECT t FROM public.anabranch_topics($1) t", topics)
        assert sorted(row[0] for row in found) == [UUID(int=1), UUID(int=2)]
        assert await owner.fetch("SELECT t FROM public.anabranch_topics(NULL) t") == []
        ids = [uuid4(), uuid4(), uuid4()]
        await owner.execute(
            "INSERT INTO public.documents (id) SELECT pg_catalog.unnest($1::pg_catalog.uuid[])", ids
        )
        await owner.execute(
            "INSERT INTO public.document_grants VALUES ($1, 'b'), ($1, 'B'), ($1, 'a'), ($2, 'ä')", *ids[:2]
        )
        readers = {
            row[0]: row[1] for row in await owner.fetch("SELECT * FROM public.anabranch_all_readers()")
        }
        assert readers == {ids[0]: ["B", "a", "b"], ids[1]: ["ä"]}
        for id_ in ids:
            assert await owner.fetchval("SELECT public.anabranch_readers($1)", id_) == readers.get(id_)


@pytest.mark.parametrize("search", [*SEARCHES, "passages"])
async def test_searches_inline_the_functions(database: Database, search: str) -> None:
    """In the text already: PostgreSQL would have to inline them again for each execution."""
    assert "anabranch_" not in postgres._SQL[search]
    store = PostgresStore(
        database.worker,
        connections=1,
        search_timeout_seconds=20,
        exact_scan_rows=20_000,
    )
    await store.open()
    try:
        # With three pairs, a search compares the values in addition to their entries.
        metadata = ["year", "2020", "language", "en", "kind", "memo"]
        asked = Asked("everything", ("metadata",), (None, None, None, None, None, metadata))
        async with asyncio.timeout(60) as limit, store._transaction_as(["user:1"], limit) as connection:
            statement = await connection.prepare(postgres._SQL[search])
            explain = (
                f"EXPLAIN EXECUTE \"{statement.get_name()}\" (ARRAY['{uuid4()}']::uuid[])"
                if search == "passages"
                else _explanation(
                    statement.get_name(), search, asked, unit_vectors(1, 5)[0].tolist(), expand_parents=True
                )
            )
            plan = await plan_text(connection, explain)
    finally:
        await store.close(timeout_seconds=3)
    assert "jsonb_typeof" in plan
    assert ("sha256" in plan) == (search == "search_exactly")
    assert "anabranch_metadata" not in plan


@pytest.mark.parametrize(
    ("query", "shows"),
    [
        (
            "SELECT * FROM anabranch_all_readers() WHERE document_id = gen_random_uuid()",
            "document_grants_pkey",
        ),
        ("SELECT t FROM document_chunks c, anabranch_topics(c.related_topic_ids) t", "unnest"),
        ("SELECT e FROM document_chunks c, anabranch_metadata_entries('{}', c.metadata) e", "sha256"),
    ],
)
async def test_triggers_and_verification_inline_the_functions(
    database: Database, query: str, shows: str
) -> None:
    async with connected(database.owner) as owner:
        await owner.execute("SET enable_seqscan = off")  # as the trigger functions do
        plan = await plan_text(owner, f"EXPLAIN {query}")
    assert shows in plan
    assert "anabranch_" not in plan


async def plan_text(connection: Any, explain: str) -> str:
    rows = await connection.fetch(
        explain.replace("EXPLAIN (FORMAT JSON)", "EXPLAIN", 1).replace("EXPLAIN", "EXPLAIN (VERBOSE)", 1)
    )
    return "\n".join(row[0] for row in rows)


@pytest.mark.parametrize(
    ("role", "function", "allowed"),
    [
        ("worker", "anabranch_metadata_text('1')", True),
        ("worker", "anabranch_merged_metadata('{}', '{}')", True),
        ("worker", "anabranch_metadata_entry('a', 'b')", True),
        ("worker", "anabranch_metadata_entries('{}', '{}')", False),
        ("worker", "anabranch_topics('{}')", False),
        ("worker", "anabranch_all_readers()", False),
        ("writer", "anabranch_metadata_text('1')", False),
    ],
)
async def test_only_searches_may_call_the_functions(
    database: Database, role: str, function: str, *, allowed: bool
) -> None:
    async with connected(getattr(database, role)) as connection:
        assert (
            await connection.fetchval(
                "SELECT has_function_privilege(oid, 'EXECUTE') FROM pg_proc WHERE proname = $1",
                function.partition("(")[0],
            )
            == allowed
        )
        if allowed:
            await connection.fetch(f"SELECT * FROM {function}")
