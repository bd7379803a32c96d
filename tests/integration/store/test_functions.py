"""Functions of the store: no search_path changes what they do, and those that writes call cost no more than inline."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

import pytest
from pgvector.asyncpg import register_vector

from streams.retrieval import Search
from streams.store.migrate import migrate
from tests.conftest import SETTING
from tests.integration.connections import connected, execute, opened_store, problems
from tests.integration.corpora import Chunk, Corpus, Document, load, unit_vectors
from tests.integration.oracle import merged_metadata, metadata_rows

if TYPE_CHECKING:
    import asyncpg

    from tests.conftest import Database

VALUES = [
    '"text"', '""', '"a\\u0001\\"\\\\\\n"', '"ö😀"', '"null"', '"2020"',
    "null", "true", "false", "0", "-1", "2020", "[]", "{}", '["a", 1, null]', '{"b": {"a": "x"}, "aa": 1}',
]  # fmt: skip
LAYERS = [
    '{"a": 1, "b": "x"}',
    '{"a": null, "c": []}',
    '{"b": ["x", "x", 1, [1]], "a": "2020-01-01", "c": "-1.5"}',
    "{}",
    "null",
    '"text"',
    "[1]",
    "3",
    None,
]

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
                rows = await owner.fetch(
                    "SELECT * FROM public.anabranch_metadata_rows($1, $2)", document, chunk
                )
                assert len(rows) == len({tuple(row) for row in rows})
                assert {tuple(row) for row in rows} == metadata_rows(*layers)


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


# Objects of the same names in schema public, whose argument types fit better than those of pg_catalog.
CLOSER = """
    GRANT USAGE ON SCHEMA public TO PUBLIC;
    CREATE FUNCTION public.array_agg_of(uuid[], uuid) RETURNS uuid[] LANGUAGE sql AS $$ SELECT '{}'::uuid[] $$;
    CREATE AGGREGATE public.array_agg(uuid) (SFUNC = public.array_agg_of, STYPE = uuid[], INITCOND = '{}');
    CREATE FUNCTION public.array_agg_of(float8[], float8) RETURNS float8[] LANGUAGE sql AS $$ SELECT '{}'::float8[] $$;
    CREATE AGGREGATE public.array_agg(float8) (SFUNC = public.array_agg_of, STYPE = float8[], INITCOND = '{}');
    CREATE FUNCTION public.cardinality(uuid[]) RETURNS int LANGUAGE sql AS $$ SELECT 0 $$;
    CREATE FUNCTION public.cardinality(text[]) RETURNS int LANGUAGE sql AS $$ SELECT 0 $$;
    CREATE FUNCTION public.unnest(uuid[]) RETURNS SETOF uuid LANGUAGE sql AS $$ SELECT NULL::uuid $$;
    CREATE FUNCTION public.array_remove(uuid[], uuid) RETURNS uuid[] LANGUAGE sql AS $$ SELECT NULL::uuid[] $$;
    CREATE FUNCTION public.array_position(uuid[], uuid) RETURNS int LANGUAGE sql AS $$ SELECT 1 $$;
    CREATE FUNCTION public.least(int, int) RETURNS int LANGUAGE sql AS $$ SELECT 1 $$;
    CREATE FUNCTION public.row_security_active(oid) RETURNS boolean LANGUAGE sql AS $$ SELECT true $$;
    CREATE FUNCTION public.set_config(text, text, boolean) RETURNS text LANGUAGE sql AS $$ SELECT '' $$;
    CREATE FUNCTION public.octet_length(varchar) RETURNS int LANGUAGE sql AS $$ SELECT -1 $$;
    CREATE FUNCTION public.never(varchar, text) RETURNS boolean LANGUAGE sql AS $$ SELECT false $$;
    CREATE OPERATOR public.= (LEFTARG = varchar, RIGHTARG = text, FUNCTION = public.never);
    CREATE FUNCTION public.always(varchar, varchar) RETURNS boolean LANGUAGE sql AS $$ SELECT true $$;
    CREATE OPERATOR public.= (LEFTARG = varchar, RIGHTARG = varchar, FUNCTION = public.always);
    CREATE OPERATOR public.^@ (LEFTARG = varchar, RIGHTARG = text, FUNCTION = public.never);
    CREATE FUNCTION public.never(uuid, uuid[]) RETURNS boolean LANGUAGE sql AS $$ SELECT false $$;
    CREATE FUNCTION public.never(float8, float8) RETURNS boolean LANGUAGE sql AS $$ SELECT false $$;
    CREATE FUNCTION public.generate_series(int, int) RETURNS SETOF int LANGUAGE sql AS $$ SELECT 1 WHERE false $$;
    CREATE FUNCTION public.cardinality(int[]) RETURNS int LANGUAGE sql AS $$ SELECT 0 $$;
    CREATE FUNCTION public.jsonb_array_elements(jsonb, OUT value jsonb) RETURNS SETOF jsonb LANGUAGE sql
      AS $$ SELECT '1'::jsonb WHERE false $$;
"""
# The same, in front of everything on the caller's search_path; and what stands in for pgvector's own there.
IN_FRONT = (
    CLOSER.replace("public.", "trap.").replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION")
    + """
    CREATE FUNCTION trap.l2_normalize(vector) RETURNS vector LANGUAGE sql AS $$ SELECT $1 $$;
    CREATE FUNCTION trap.zero(vector, vector) RETURNS float8 LANGUAGE sql AS $$ SELECT 0::float8 $$;
    CREATE OPERATOR trap.<=> (LEFTARG = vector, RIGHTARG = vector, FUNCTION = trap.zero);
    CREATE FUNCTION trap.equal(uuid, uuid) RETURNS boolean LANGUAGE sql AS $$ SELECT true $$;
    CREATE OPERATOR trap.= (LEFTARG = uuid, RIGHTARG = uuid, FUNCTION = trap.equal);
"""
)
SESSION, TOPIC = UUID(int=1), UUID(int=2)
METADATA = json.dumps(
    [
        {"key": "year", "values": ["2020"]},
        {"key": "a", "values": ["b", "c"]},
        {"key": "tags", "element": "x"},
        {"key": "year", "numbers": [2020, None]},
        {"key": "day", "instants": ["2024-01-01T00:00:00Z", "2024-12-31T00:00:00Z"]},
    ]
)
ALL_FILTERS: list[Any] = ["1", "memo", "https://example.org/1", METADATA]
SCOPES = [
    *itertools.product(
        [(None, None), (SESSION, None), (SESSION, TOPIC)],
        [
            [None] * 4,
            *([value if n == at else None for n, value in enumerate(ALL_FILTERS)] for at in range(4)),
            ALL_FILTERS,
        ],
    )
]  # fmt: skip


def corpus() -> Corpus:
    """Two documents, one of which has what each filter wants, and problems with parents."""
    documents = [
        Document(
            UUID(int=number + 10),
            frozenset({"user:1"}),
            session_id=SESSION,
            source_url=f"https://example.org/{number}",
            document_type="memo" if number else "statute",
            metadata={"year": 2020, "a": "b", "tags": ["x"], "day": "2024-05-01"} if number else {},
        )
        for number in range(2)
    ]
    return Corpus.of(
        documents,
        [
            Chunk(
                UUID(int=number + 100),
                documents[number % 2].id,
                f"text {number}",
                vector,
                session_id=SESSION,
                related_topic_ids=[TOPIC] if number % 3 else [],
                section=str(number % 2),
                chunk_type="problem" if number % 4 < 2 else "theory",
                parent_chunk_id=UUID(int=100 + (number + 2) % 40),
                token_count=number,
            )
            for number, vector in enumerate(unit_vectors(40, 3))
        ],
    )


async def answers(worker: asyncpg.Connection[asyncpg.Record]) -> list[Any]:
    """What each function returns, for each scope, searched exactly and by the index."""
    parameters = ", ".join(f"${number}" for number in range(1, 10))
    caller, query = '["user:1"]', unit_vectors(1, 4)[0]
    found: list[Any] = []
    for (session, topic), filters in SCOPES:
        for small in (1000, 0):
            scope = (caller, query, session, topic, *filters, 15)
            row = await worker.fetchrow(
                f"SELECT * FROM public.anabranch_search({parameters}, true, $10, $10, true, 100, 20000)",
                *scope,
                small,
            )
            assert row is not None
            assert row["ids"]
            with_passages = await worker.fetch(
                f"SELECT * FROM public.anabranch_search_passages({parameters}, $10, $10, true, 100, 20000)",
                *scope,
                small,
            )
            found += [tuple(row), sorted(map(tuple, with_passages))]
    ids = [UUID(int=number + 100) for number in range(40)]
    for function in ("sizes", "passages"):
        rows = await worker.fetch(f"SELECT * FROM public.anabranch_{function}($1, $2, 20000)", caller, ids)
        assert len(rows) == 40
        found.append(sorted(map(tuple, rows)))
    return found


@pytest.mark.parametrize(
    ("objects", "path"),
    [
        (CLOSER, "public"),
        (f"{TRAP}{IN_FRONT}", "trap, public, pg_catalog"),
        (f"{TRAP}{IN_FRONT}{TRAP_TYPES}", "trap, public, pg_catalog"),
    ],
    ids=["closer", "in front", "with types"],
)
async def test_searches_answer_whatever_the_search_path_and_what_is_in_public(
    database: Database, objects: str, path: str
) -> None:
    # Columns of a back end's own: varchar fits an operator of (varchar, text) better than one of (text, text).
    await execute(
        database.owner,
        "ALTER TABLE document_chunks ALTER section TYPE varchar(20), ALTER text_content TYPE varchar,"
        " ALTER chunk_type TYPE varchar(20);"
        "ALTER TABLE documents ALTER document_type TYPE varchar(20)",
    )
    await load(database.writer, corpus())
    async with connected(database.worker) as worker:
        await register_vector(worker)
        wanted = await answers(worker)
    *of_scopes, _, _ = wanted
    assert any(parent for _, _, parents, *_ in of_scopes[::2] for parent in parents or ())
    assert all(id_ for passages in of_scopes[1::2] for _, _, _, id_, *_ in passages)
    await execute(database.admin, objects)
    async with connected(database.worker) as worker:
        await register_vector(worker)
        # asyncpg loads the types that it does not know by the same search_path.
        await worker.prepare("SELECT $1::uuid[], $2::text[], $3::float8[], $4::bool[]")
        await worker.execute(f"SET search_path = {path}")
        assert await answers(worker) == wanted


async def test_pgvector_may_be_in_any_schema(database: Database) -> None:
    """A store that was migrated before its extension moved has to be migrated again."""
    held = corpus()
    await load(database.writer, held)
    await execute(
        database.admin,
        "CREATE SCHEMA extensions; GRANT USAGE ON SCHEMA extensions TO PUBLIC;"
        "ALTER EXTENSION vector SET SCHEMA extensions",
    )
    assert [problem for problem in await problems(database) if "anabranch_search_index is altered" in problem]
    assert "created function anabranch_search_index" in await migrate(
        database.owner, principals_setting=SETTING
    )
    assert await migrate(database.owner, principals_setting=SETTING) == []
    assert await problems(database) == []
    for small in (1000, 0):
        async with opened_store(database.worker, small_scope_rows=small) as store:
            search = Search(
                unit_vectors(1, 4)[0], ["user:1"], SESSION, None, None, expand_parents=False, limit=5
            )
            found = await store.search(search)
            again = await store.search(replace(search, with_passages=True))
        query = search.vector
        nearest = sorted(held.chunks.values(), key=lambda chunk: -float(chunk.embedding @ query))[:5]  # type: ignore[operator]  # every chunk has one
        assert [candidate.chunk_id for candidate in found.candidates] == [chunk.id for chunk in nearest]
        assert again.passages.keys() == {chunk.id for chunk in nearest}


@pytest.mark.parametrize(
    ("query", "shows"),
    [
        (
            "SELECT * FROM anabranch_all_readers() WHERE document_id = gen_random_uuid()",
            "document_grants_pkey",
        ),
        ("SELECT t FROM document_chunks c, anabranch_topics(c.related_topic_ids) t", "unnest"),
        ("SELECT e FROM document_chunks c, anabranch_metadata_rows('{}', c.metadata) e", "sha256"),
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
        ("worker", "anabranch_sizes('[]', '{}', 1)", True),
        ("worker", "anabranch_passages('[]', '{}', 1)", True),
        ("writer", "anabranch_sizes('[]', '{}', 1)", False),
        ("writer", "anabranch_search", False),
        ("writer", "anabranch_search_passages", False),
        ("writer", "anabranch_search_exactly", False),
        ("writer", "anabranch_set_principals", False),
        ("worker", "anabranch_element_entry('a', 'b')", True),
        ("worker", "anabranch_range_entry('a')", True),
        ("worker", "anabranch_conditions('[]')", True),
        ("worker", "anabranch_metadata_rows('{}', '{}')", False),
        ("worker", "anabranch_metadata_number('1')", False),
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
