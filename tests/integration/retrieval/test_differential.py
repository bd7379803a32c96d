"""Thousands of events by many askers at once, over one small pool, while searches are broken off in every way.

Each result that comes is compared with the oracle's for its asker. What is random comes from one seed, which is
printed; `DIFFERENTIAL_SEED` repeats its events and faults (not the moments at which the server sees them).
"""

import asyncio
import copy
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import count
from time import perf_counter
from typing import Any, TypeVar
from uuid import UUID

import asyncpg
import numpy as np
import pytest
from pgvector.asyncpg import register_vector

from streams.core.errors import ContractViolation, SearchTimeout, StoreUnavailable, TransientError
from streams.core.messages import QueryEmbedding
from streams.core.profiles import BUILTIN_PROFILES, Profile, resolve_params
from streams.retrieval import retrieve, unit_vector
from streams.store.postgres import PooledConnection, PostgresStore
from streams.tokens import count_tokens
from streams.wire import result_to_json
from tests.conftest import SETTING, Database
from tests.integration.corpora import Chunk, Corpus, Document, load, random_uuid, unit_vectors
from tests.integration.harness import query
from tests.integration.oracle import PROFILES, _matches, expected_result, parent_state

T = TypeVar("T")

pytestmark = pytest.mark.slow

CONNECTIONS = 3
ASKERS = 10  # at a time; an event with a topic uses two connections
EVENTS = 3000
EVENTS_AMID_CHANGES = 600

HOSTILE: Sequence[str] = (
    # separators, and what they would be split into
    *(",", ";", "|", ":", "user:1,user:2", "user:1;user:2", "user:1 user:2", "user:1\nuser:2", "a," * 128),
    # arrays, objects, literals and fragments of them, in JSON and in PostgreSQL's own notation
    *("[]", "[", "]", '["user:1"]', '"user:1"', '", "user:1', '"]', "{}", "{", "}", '{"a":1}', '{"', "null"),
    *("NULL", "true", "0", "{user:1,public}", '{"user:1"}', '"' * 256, "[" * 256, "\\u0070ublic", "\\u0000"),
    # quotes, backslashes, placeholders
    *(
        '"',
        "'",
        "''",
        "`",
        "\\",
        "\\\\",
        "\\x",
        "\\'",
        "\\n",
        "%",
        "%%",
        "%s",
        "%(a)s",
        "_",
        "$1",
        "$$",
        "$a$",
    ),
    *("{0}", "${x}", ":a", ":'a'", "?", "@", "*", "user:*", ".*", "--", "/*", "*/"),
    # attempts
    *("'; DROP TABLE documents; --", "' OR '1'='1", "') OR true --", "user:1' || 'public", "$1) OR ($1"),
    *("\\'; SELECT pg_sleep(60); --", "'); SET ROLE postgres; --", "\"]'::jsonb) OR true OR ('[\""),
    *(
        "'; SET anabranch.principals = '[\"user:1\"]'; --",
        "anabranch.principals",
        "<script>alert(1)</script>",
    ),
    # nearly somebody else
    *(
        " ",
        " public",
        "public ",
        "PUBLIC",
        "Public",
        "public\n",
        "pub\u200blic",
        "\tpublic",
        "user:1 ",
        "user:01",
    ),
    # Unicode
    *(
        "é",
        "e\u0301",
        "\ufb01",
        "fi",
        "ß",
        "SS",
        "İ",
        "ключ",
        "鍵",
        "\U0001f511",
        "\u202e",
        "\ufeff",
        "\uffff",
    ),
    *("\x01", "\x1b[0m", "\x7f", "\r", "\t\n", "\U0010ffff"),
    *("x" * 256, "x" * 255, "\U0001f511" * 256),
)
ORDINARY = ("user:1", "user:2", "user:3", "group:law", "group:law/read")
NAMES = (*HOSTILE, *ORDINARY)

COMMON_FILTERS: Sequence[dict[str, Any]] = (
    {"section": "1.2"},
    {"document_type": "memo"},
    {"source_url_prefix": "https://"},
    {"metadata": {"year": "2020"}},
    {"metadata_contains": {"tags": ["common"]}},
    {"metadata_any": {"year": ["2020", "2021", *HOSTILE[:10]]}},
    {"metadata_range": {"year": {"gte": 2020}}},
)

# The oracle's table knows them by the name that they are made of.
ALIASES = {name: list(PROFILES)[number % len(PROFILES)] for number, name in enumerate(HOSTILE)}
_packing = PROFILES["packing"]
_MODELLED = {
    **BUILTIN_PROFILES,
    "packing": Profile(
        k_default=_packing.k,
        k_min=_packing.least,
        k_max=_packing.most,
        order="interleaved",
        expand_parents=True,
        token_budget=_packing.budget,
        overflow="skip",
    ),
}
ALL_PROFILES = _MODELLED | {alias: _MODELLED[name] for alias, name in ALIASES.items()}

# Some askers' statements are slow, or fail: at their first row, or in the middle of their rows, of any or one kind.
TRIPWIRE = """
    CREATE FUNCTION public.trips() RETURNS boolean LANGUAGE plpgsql VOLATILE AS $$
    DECLARE asker text := current_setting('anabranch.principals', true);
    BEGIN
      IF asker IS NULL OR position('trip:' IN asker) = 0 THEN RETURN false; END IF;
      IF position('trip:slow' IN asker) > 0 THEN PERFORM pg_sleep(0.02); RETURN false; END IF;
      IF position('trip:in:' IN asker) > 0 THEN
        RETURN position('anabranch_' || substring(asker FROM 'trip:in:([a-z_]+):') || '(' IN current_query()) > 0;
      END IF;
      IF position('trip:first' IN asker) > 0 THEN PERFORM public.trip(); END IF;
      RETURN true;
    END $$;
    CREATE FUNCTION public.trip() RETURNS boolean LANGUAGE plpgsql VOLATILE AS $$
    DECLARE trip text[] := regexp_match(current_setting('anabranch.principals', true), 'trip:([a-z_:]+):([0-9A-Z]{5})');
    BEGIN
      RAISE EXCEPTION 'tripped: %', trip[1] USING ERRCODE = trip[2];
    END $$;
    CREATE FUNCTION public.trips_at(id uuid) RETURNS boolean LANGUAGE plpgsql VOLATILE AS $$
    BEGIN
      IF right(id::text, 1) IN ('3', '7') THEN PERFORM public.trip(); END IF;
      RETURN true;
    END $$;
    CREATE POLICY tripwire ON public.document_chunks AS RESTRICTIVE FOR SELECT TO anabranch_reader
      USING ((SELECT NOT public.trips()) OR public.trips_at(id));
"""
# Division by zero, a constraint, out of disk, cancelled, deadlock, permission, internal error.
SQLSTATES = ("22012", "23505", "53100", "57014", "40P01", "42501", "XX000")
# With weights: some events have no statement of a kind.
TRIPS = {"first": 1, "middle": 1, "in:search_passages": 3, "in:sizes": 3, "in:passages": 2}

# Whatever the planner thinks of so small a table, an approximate search is one of the index. It may read all of it:
# one that gives up early, and finds as many rows as were asked for, is approximate indeed, and cannot know it.
BY_THE_INDEX = """
    ALTER DATABASE {name} SET enable_seqscan = off;
    ALTER DATABASE {name} SET enable_bitmapscan = off;
    ALTER DATABASE {name} SET enable_sort = off;
"""


@pytest.fixture
def seed() -> int:
    return int(os.environ.get("DIFFERENTIAL_SEED", random.SystemRandom().randrange(2**32)))


# What is asked


@dataclass(frozen=True)
class Event:
    """An event, and what the test has to know about it."""

    json: dict[str, Any]
    vector: int  # which of the world's queries

    def but(self, **fields: Any) -> "Event":
        return replace(self, json=self.json | fields)

    @property
    def readers(self) -> set[str]:
        return {*self.json["principals"], "public"}

    @property
    def session(self) -> UUID | None:
        return None if self.json.get("session_id") is None else UUID(self.json["session_id"])

    @property
    def topic(self) -> UUID | None:
        return None if self.json.get("topic_id") is None else UUID(self.json["topic_id"])

    @property
    def about(self) -> str:
        """For the message of a failure."""
        return ascii({name: value for name, value in self.json.items() if name != "embedding"})


class World:
    """A corpus of many documents, and random events about it.

    There are few distinct vectors, and many copies of each: ties are the rule. A crowd of distinct ones, which few may
    read, stands on one side: a query from there meets hundreds of them before anybody else. The index' graph is small
    enough to be seen whole, so that the approximate path owes an exact answer too.
    """

    def __init__(self, seed: int, *, families_keep_together: bool = False) -> None:
        self.rng = random.Random(seed)
        self.families_keep_together = families_keep_together
        self.sessions = [random_uuid(self.rng) for _ in range(4)]
        self.topics = [random_uuid(self.rng) for _ in range(4)]
        noise = unit_vectors(560, seed)
        self.axis = noise[0]
        self.vectors = noise[1:81]
        self.crowd = (noise[110:] * np.float32(0.5) + self.axis).astype(np.float32)
        self.queries = [
            self.vectors[n % 80] * np.float32(0.8) + self.axis * np.float32(1 if n % 4 == 0 else -0.5)
            for n in range(60)
        ]
        self.components = [[float(component) for component in vector] for vector in self.queries]
        self.corpus = self._corpus()
        sizes = Counter(chunk.document_id for chunk in self.corpus.chunks.values())
        self.small = {document for document in self.corpus.documents if sizes[document] < 20}

    def name(self) -> str:
        return self.rng.choice(NAMES)

    def some_readers(self) -> frozenset[str]:
        rng = self.rng
        readers = {self.name() for _ in range(rng.choice([0, 1, 2, 3, 5]))}
        if rng.random() < 0.35:
            readers.add(rng.choice(ORDINARY))
        if rng.random() < 0.1:
            readers.add("public")
        return frozenset(readers)

    def _corpus(self) -> Corpus:
        rng = self.rng
        documents = [
            Document(
                random_uuid(rng),
                self.some_readers(),
                session_id=rng.choice([*self.sessions, None]),
                title=rng.choice([None, self.name()]),
                source_url=rng.choice([None, self.name(), "https://example.org/" + self.name()]),
                file_description=rng.choice([None, None, self.name()]),
                document_type=rng.choice([None, self.name(), "memo"]),
                metadata=rng.choice(
                    [
                        None,
                        {},
                        {self.name(): self.name()},
                        {"year": 2020},
                        {"year": 2021, "tags": ["common", self.name()]},
                    ]
                ),
            )
            for _ in range(150)
        ]
        chunks: list[Chunk] = []
        for document in documents:
            of_this: list[Chunk] = []
            for _ in range(rng.randrange(10)):
                family = of_this if self.families_keep_together else rng.choice([of_this, chunks])
                parent = rng.choice([None, *[rng.choice(family)] * 2]) if family else None
                of_this.append(self._chunk(document, parent))
            chunks += of_this
        crowds = [
            Document(random_uuid(rng), frozenset(readers)) for readers in ({"group:law"}, {"{}"}, set())
        ]
        chunks += [
            Chunk(random_uuid(rng), crowds[number % 3].id, "One of many.", vector, token_count=4)
            for number, vector in enumerate(self.crowd)
        ]
        return Corpus.of([*documents, *crowds], chunks)

    def _chunk(self, document: Document, parent: Chunk | None) -> Chunk:
        """A chunk; its parent, which may be in another document, is as often in its session as in another."""
        rng = self.rng
        sessions = [*self.sessions, document.session_id]
        vector = rng.choice(self.vectors) * np.float32(rng.choice([1, 1, 2, 2.0**-20]))
        return Chunk(
            random_uuid(rng),
            document.id,
            rng.choice([self.name(), "A sentence of a few words.", "word " * 60]),
            rng.choice([vector] * 12 + [np.zeros(768, dtype=np.float32), None]),
            session_id=rng.choice(
                [*sessions, *([] if parent is None else [parent.session_id] * len(sessions))]
            ),
            parent_chunk_id=rng.choice([None, random_uuid(rng)]) if parent is None else parent.id,
            related_topic_ids=rng.sample(self.topics, rng.randrange(3)),
            chunk_type=rng.choice(["theory", "problem"]),
            chunk_position=rng.choice([None, rng.randrange(1000)]),
            token_count=rng.choice([None, 7, 60, 600]),
            section=rng.choice([None, self.name(), "1.2"]),
            coordinates=rng.choice([None, {self.name(): 1.5}]),
            metadata=rng.choice(
                [
                    None,
                    {self.name(): self.name()},
                    {"year": "2020"},
                    {self.name(): [self.name(), self.name()], "year": self.name()},
                ]
            ),
        )

    def event(self, *principals: str) -> Event:
        """A random event; its asker is in these groups as well."""
        rng = self.rng
        vector = rng.randrange(len(self.queries))
        session = rng.choice([*self.sessions, *self.sessions, None])
        how_many = rng.choice([1, 2, 3, 6, 64 - len(principals)])
        callers = [*principals, *(self.name() for _ in range(how_many))]
        if rng.random() < 0.4:
            callers[-1] = rng.choice(ORDINARY)
        rng.shuffle(callers)
        event = query(
            [],
            principals=callers,
            session_id=session,
            topic_id=None if session is None else rng.choice([*self.topics, None, None]),
            profile=rng.choice([None, *PROFILES, *PROFILES, self.alias()]),
            k=rng.choice([None, None, 1, 3, 9, 15, 30]),
            similarity_threshold=rng.choice([None] * 6 + [0, 0.3]),
            token_budget=rng.choice([None] * 5 + [1, 100, 1000]),
            filters=self._filters() if rng.random() < 0.3 else None,
            embedding_model=rng.choice([None, self.name()]),
        )
        return Event(event | {"embedding": self.components[vector]}, vector)

    def alias(self) -> str:
        return self.rng.choice(HOSTILE)

    def _filters(self) -> dict[str, Any]:
        """Half of them are met by many chunks, though seldom by a chunk and its parent; others by one or none."""
        rng = self.rng
        if rng.random() < 1 / 2:
            return rng.choice(COMMON_FILTERS)
        chunk = rng.choice(list(self.corpus.chunks.values()))
        document = self.corpus.documents[chunk.document_id]
        url = document.source_url or self.name()
        metadata = chunk.metadata or document.metadata or {self.name(): self.name()}
        own: dict[str, Any] = {
            "section": rng.choice([chunk.section, self.name()]),
            "document_type": rng.choice([document.document_type, self.name()]),
            "source_url_prefix": rng.choice([url[: rng.randrange(30)], url, self.name()]),
            "metadata": rng.choice(
                [{key: str(value) for key, value in metadata.items()}, {self.name(): self.name()}]
            ),
        }
        lists = {key: value for key, value in metadata.items() if isinstance(value, list)}
        own["metadata_contains"] = lists or {self.name(): [self.name()]}
        own["metadata_any"] = {key: [str(value), self.name()] for key, value in metadata.items()}
        return {name: own[name] for name in rng.sample(list(own), rng.choice([1, 1, 1, 2]))}


# What is right


class Truth:
    """The oracle, over the part of the corpus that an event can be about."""

    def __init__(self, corpus: Corpus, distances: Sequence[Mapping[UUID, float]]) -> None:
        self.corpus = corpus
        self.distances = distances
        self._parts: dict[UUID | None, dict[UUID, Chunk]] = {None: dict(corpus.chunks)}

    def _part(self, session: UUID | None) -> dict[UUID, Chunk]:
        """A session's chunks, and their parents, which may be anywhere."""
        if session not in self._parts:
            chunks = self.corpus.chunks
            part = {chunk.id: chunk for chunk in chunks.values() if chunk.session_id == session}
            parents = {chunk.parent_chunk_id for chunk in part.values()} & chunks.keys()
            self._parts[session] = part | {parent: chunks[parent] for parent in parents if parent}
        return self._parts[session]

    def result(self, event: Event, documents: Mapping[UUID, Document] | None = None) -> dict[str, Any]:
        return self._over(event, documents or self.corpus.documents, self._part(event.session))

    def _over(
        self, event: Event, documents: Mapping[UUID, Document], chunks: Mapping[UUID, Chunk]
    ) -> dict[str, Any]:
        profile = event.json["profile"]
        modelled = event.json | {"profile": ALIASES.get(profile, profile)}
        wanted = expected_result(
            Corpus(documents, chunks), modelled, self.distances[event.vector], count_tokens
        )
        return wanted | {"profile": profile or "extraction"}

    def scope_rows(self, event: Event) -> int:
        """Rows of the event's larger scope, which is the global one; stored zero vectors are among them."""
        return sum(
            chunk.embedding is not None
            and (event.session is None or chunk.session_id == event.session)
            and bool(self.corpus.documents[chunk.document_id].readers & event.readers)
            and _matches(chunk, self.corpus.documents[chunk.document_id], event.json["filters"] or {})
            for chunk in self._part(event.session).values()
        )

    def parents(self, found: Mapping[str, Any], event: Event) -> Counter[str]:
        """What became of the parents of the chunks that a result rests on."""
        if not ALL_PROFILES[event.json["profile"] or "extraction"].expand_parents:
            return Counter()
        matched = [self.corpus.chunks[UUID(passage["matched_chunk_id"])] for passage in found["results"]]
        return Counter(f"parent: {parent_state(self.corpus, event.json, chunk)}" for chunk in matched)

    def explains(self, found: dict[str, Any], event: Event) -> bool:
        """Whether a truncated result is the right one over the rows that the scan has seen."""
        chunks = self.corpus.chunks
        matched = [UUID(passage["matched_chunk_id"]) for passage in found["results"]]
        seen = {id_: chunks[id_] for id_ in matched}
        for id_ in {UUID(passage["chunk_id"]) for passage in found["results"]} - seen.keys():
            seen[id_] = replace(chunks[id_], embedding=None)  # a parent, which is not found by itself
        # A parent that is there, and is not seen, must not pass for one that is missing.
        wanted = self._over(event, self.corpus.documents, seen)["results"]
        if event.topic is None:
            return bool(found["results"] == wanted)

        def apart(passages: list[dict[str, Any]]) -> list[dict[str, Any]]:
            # What one arm has not seen the other may have: which arm took it is not known.
            bare = [{**passage, "rank": None, "scope": None} for passage in passages]
            return sorted(bare, key=lambda passage: str(passage["chunk_id"]))

        return apart(found["results"]) == apart(wanted)


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """What of a result is not as it should be, in few words."""

    def brief(value: Any) -> Any:
        if not isinstance(value, list):
            return value
        return [(passage["matched_chunk_id"][:8], passage["scope"], passage["score"]) for passage in value]

    lines = [
        f"{name}: {brief(found[name])} != {brief(wanted[name])}"
        for name in wanted
        if found[name] != wanted[name]
    ]
    return "\n".join(lines)


def check(found: dict[str, Any], event: Event, truth: Truth, *, exact_scan_rows: int) -> None:
    documents = truth.corpus.documents
    for passage in found["results"]:
        assert documents[UUID(passage["document_id"])].readers & event.readers, f"leaked: {event.about}"
    if "scan_truncated" not in found["warnings"]:
        wanted = truth.result(event)
        if found != wanted:
            raise AssertionError(f"{differences(found, wanted)}\n{event.about}")
        return
    # What else is allowed: to say that it may not be all, where the scope is too large to be searched exactly.
    assert truth.scope_rows(event) > exact_scan_rows, event.about
    assert [passage["rank"] for passage in found["results"]] == list(range(1, found["k_returned"] + 1))
    assert truth.explains(found, event), event.about


# How it is asked


async def answer(store: PostgresStore, event: Event) -> dict[str, Any]:
    parsed = QueryEmbedding.parse(event.json)
    rules = resolve_params(parsed, ALL_PROFILES, "extraction")
    retrieved = await retrieve(parsed, rules, store, count_tokens, started=perf_counter())
    found = result_to_json(retrieved.result)
    del found["query_time_ms"]
    return found | {"warnings": set(found["warnings"])}


def variant(store: PostgresStore, **attributes: Any) -> PostgresStore:
    """The same pool, searched in another way."""
    other = copy.copy(store)
    for name, value in attributes.items():
        assert hasattr(store, f"_{name}")
        setattr(other, f"_{name}", value)
    return other


@dataclass(frozen=True)
class Stage:
    """A loaded database, a store on it, and what is true of it."""

    world: World
    truth: Truth
    store: PostgresStore
    admin: asyncpg.Connection
    writer: asyncpg.Connection


@asynccontextmanager
async def staged(database: Database, world: World) -> AsyncIterator[Stage]:
    await load(database.writer, world.corpus)
    admin, writer = await asyncpg.connect(database.admin), await asyncpg.connect(database.writer)
    store = PostgresStore(
        database.worker,
        connections=CONNECTIONS,
        search_timeout_seconds=20,
        exact_scan_rows=20_000,
    )
    try:
        await admin.execute(TRIPWIRE)
        for statement in BY_THE_INDEX.format(name=database.name).strip().splitlines():
            await admin.execute(statement)
        await admin.execute("ANALYZE")
        await register_vector(admin)
        distances = [
            dict(
                map(
                    tuple,
                    await admin.fetch(
                        "SELECT id, embedding <=> $1 FROM document_chunks WHERE embedding IS NOT NULL",
                        unit_vector(components),
                    ),
                )
            )
            for components in world.components
        ]
        await store.open()
        await store.warm_up()
        yield Stage(world, Truth(world.corpus, distances), store, admin, writer)
    finally:
        await store.close(timeout_seconds=3)
        await writer.close()
        await admin.close()


READABLE = {
    "documents": "id",
    "document_chunks": "id",
    "chunk_topics": "chunk_id",
    "chunk_metadata": "chunk_id",
    "access_sets": "id",
}
LOOK = f"SELECT current_setting('{SETTING}', true), pg_backend_pid(), " + " + ".join(
    f"(SELECT count({column}) FROM public.{table})" for table, column in READABLE.items()
)


async def check_connection(connection: PooledConnection) -> int:
    """Nobody's principals are left on a connection, and no transaction; returns the server's process."""
    assert not connection.is_in_transaction()
    [(principals, pid, rows)] = await connection.fetch(LOOK)
    assert principals in (None, "")
    assert rows == 0
    return int(pid)


async def look_at_all(store: PostgresStore) -> None:
    """Every connection of the pool at once, so that none is missed; a leaked one would never come."""
    everyone = asyncio.Barrier(CONNECTIONS)

    async def one() -> int:
        async with store._connection() as connection:
            pid = await check_connection(connection)
            await everyone.wait()
            return pid

    async with asyncio.timeout(20):
        pids = await asyncio.gather(*(one() for _ in range(CONNECTIONS)))
    assert len(set(pids)) == CONNECTIONS
    assert dict(store.connections()) == {"idle": CONNECTIONS, "busy": 0}


async def sabotage(admin: asyncpg.Connection, rng: random.Random, seen: Counter[str]) -> None:
    """Cancels statements and ends connections on the server, and reads what they are doing."""
    while True:
        await asyncio.sleep(rng.uniform(0.02, 0.12))
        rows = await admin.fetch(
            "SELECT pid, query FROM pg_stat_activity WHERE datname = current_database()"
            " AND application_name = 'anabranch' AND state <> 'idle' ORDER BY pid"
        )
        seen.update(f"statement: {row['query']}" for row in rows)
        if rows:
            weapon = rng.choice(["pg_cancel_backend"] * 3 + ["pg_terminate_backend"])
            seen[weapon] += await admin.fetchval(f"SELECT {weapon}($1)::int", rng.choice(rows)["pid"])


# Askers, faults


@dataclass
class Trial:
    """One fault after the other, and what became of the events."""

    stage: Stage
    rng: random.Random
    seen: Counter[str] = field(default_factory=Counter)

    def event(self) -> tuple[Event, str]:
        disruption = self.rng.choices(
            ["none", "cancelled", "hasty", "slow and cancelled", "slow and hasty", "SQL error", "look"],
            [83, 3, 2, 2, 1, 6, 3],
        )[0]
        extra = []
        if disruption == "SQL error":
            [trip] = self.rng.choices(list(TRIPS), list(TRIPS.values()))
            extra = [f"trip:{trip}:{self.rng.choice(SQLSTATES)}"]
        elif disruption.startswith("slow"):
            extra = ["trip:slow"]
        return self.stage.world.event(*extra), disruption

    async def run(self, events: Iterator[tuple[Event, str]]) -> None:
        for event, disruption in events:
            self.seen["events"] += 1
            await self.one(event, disruption)

    async def one(self, event: Event, disruption: str) -> None:
        rng, store = self.rng, self.stage.store
        exactly = rng.random() < 0.4
        exact_scan_rows = rng.choice([20_000, 20_000, 10, 100])
        asked = variant(
            store,
            small_scope_rows=1000 if exactly else 3,
            exact_scan_rows=20_000 if exactly else exact_scan_rows,
            timeout=rng.uniform(0.001, 0.03) if disruption.endswith("hasty") else 20,
        )
        asking = asyncio.create_task(
            answer(asked, event) if disruption != "look" else store.inspect(check_connection)
        )
        if disruption.endswith("cancelled"):
            await asyncio.sleep(rng.uniform(0, 0.03))
            asking.cancel()
        try:
            found: Any = await asking
        except asyncio.CancelledError:
            if not disruption.endswith("cancelled"):
                raise  # the test itself is being ended
            self.seen["cancelled"] += 1
        except (SearchTimeout, StoreUnavailable) as error:
            self.seen[type(error).__name__] += 1  # of its own making, or the saboteur's
            self.seen.update(tripped(error))
        except (TransientError, asyncpg.PostgresError) as error:
            # Nothing that an event says makes a statement fail in another way.
            if disruption != "SQL error":
                raise AssertionError(event.about) from error
            self.seen["SQL error"] += 1
            self.seen.update(tripped(error))
        else:
            self.seen[f"{disruption}: done"] += 1
            if disruption == "look":
                return
            try:
                check(found, event, self.stage.truth, exact_scan_rows=asked._exact_scan_rows)
            except AssertionError as error:
                error.add_note(f"{exactly=} {exact_scan_rows=} {disruption=}")
                raise
            self.seen["searched exactly" if exactly else "searched approximately"] += 1
            self.seen.update(self.stage.truth.parents(found, event))
            self.seen.update({"passages": found["k_returned"], "empty": not found["results"]})
            self.seen.update(found["warnings"])


#: More than this many of each. How many there are in a number of events depends on the machine's speed.
FAULTS = {
    "cancelled": 20,
    "SearchTimeout": 20,
    "StoreUnavailable": 20,
    "SQL error": 20,
    **{f"tripped: {trip}": 3 for trip in TRIPS},
    "pg_cancel_backend": 20,
    "pg_terminate_backend": 10,
}


def tripped(error: BaseException) -> list[str]:
    """Which of the tripwires raised the error, if one did."""
    text = str(error if error.__cause__ is None else error.__cause__)
    return [text] if text.startswith("tripped: ") else []


def enough(make: Callable[[], T], least: int, satisfied: Callable[[], bool]) -> Iterator[T]:
    """At least so many, and more until it was worth it, for ten minutes."""
    end = perf_counter() + 600
    for number in count():
        if number >= least and (satisfied() or perf_counter() > end):
            return
        yield make()


async def index_scans(admin: asyncpg.Connection) -> int:
    return int(
        await admin.fetchval(
            "SELECT idx_scan FROM pg_stat_user_indexes WHERE indexrelname = 'document_chunks_embedding_halfvec'"
        )
    )


async def test_each_result_is_its_callers_whatever_happens_to_others(
    database: Database, figures: Callable[[str], None], seed: int
) -> None:
    print(f"DIFFERENTIAL_SEED={seed}")
    async with staged(database, World(seed)) as stage:
        trial = Trial(stage, random.Random(seed + 1))
        saboteur = asyncio.create_task(sabotage(stage.admin, random.Random(seed + 2), trial.seen))
        events = enough(
            trial.event, EVENTS, lambda: min(trial.seen[fault] - least for fault, least in FAULTS.items()) > 0
        )
        began = perf_counter()
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(ASKERS):
                    group.create_task(trial.run(events))
        finally:
            saboteur.cancel()
            with suppress(asyncio.CancelledError):
                await saboteur
        seconds = perf_counter() - began
        await look_at_all(stage.store)
        scans = await index_scans(stage.admin)

    seen = trial.seen
    statements = [what for what in seen if what.startswith("statement: ")]
    reported = {what: number for what, number in sorted(seen.items()) if what not in statements}
    figures(f"seed {seed}, {seconds:.1f} s, {scans} index scans, {reported}")
    assert seen["events"] >= EVENTS >= 3000
    # Values are bound: what the server was sent is a handful of texts, whatever was asked, by whomever.
    assert 3 <= len(statements) < 20, statements
    assert not any("user:" in text or "trip:" in text for text in statements)
    # It was worth it.
    assert seen["searched exactly"] > 500
    assert seen["searched approximately"] > 800
    assert scans > 800
    assert seen["passages"] > 5 * seen["searched exactly"]
    for state in ("valid", "missing", "unreadable", "in another session", "filtered out"):
        assert seen[f"parent: {state}"] > 3, state
    for fault, least in FAULTS.items():
        assert seen[fault] > least, fault
    assert min(seen["scan_truncated"], seen["look: done"]) > 10


# While grants change


@dataclass
class Grants:
    """Who could read what after each change. The next one waits until no search is left that overlaps the last."""

    stage: Stage
    rng: random.Random
    versions: list[Mapping[UUID, Document]]
    begun: int = 0
    committed: int = 0
    running: Counter[int] = field(default_factory=Counter)  # searches, by what was committed when they began

    async def keep_changing(self) -> None:
        while True:
            await asyncio.sleep(0.002)
            if not any(number for version, number in self.running.items() if version < self.committed):
                await self._change()

    async def _change(self) -> None:
        """Grant or revoke a few documents at once; each chunk costs an insertion into the index."""
        rng, now = self.rng, self.versions[-1]
        revokes = rng.random() < 0.5
        principal = rng.choice([*ORDINARY, *["public"] * len(ORDINARY)])
        fitting = [
            one
            for one in now.values()
            if (principal in one.readers) == revokes and one.id in self.stage.world.small
        ]
        changed = rng.sample(fitting, min(len(fitting), rng.choice([1, 3, 6])))
        readers = {
            one.id: one.readers - {principal} if revokes else one.readers | {principal} for one in changed
        }
        self.versions.append({**now, **{one.id: replace(one, readers=readers[one.id]) for one in changed}})
        self.begun += 1
        await self.stage.writer.execute(
            "DELETE FROM document_grants g USING unnest($1::uuid[]) id WHERE g.document_id = id AND principal = $2"
            if revokes
            else "INSERT INTO document_grants SELECT id, $2 FROM unnest($1::uuid[]) id",
            list(readers),
            principal,
        )
        self.committed += 1


async def search_amid_changes(grants: Grants, event: Event, seen: Counter[str]) -> None:
    stage = grants.stage
    exactly = grants.rng.random() < 0.5
    first = grants.committed
    grants.running[first] += 1
    try:
        found = await answer(variant(stage.store, small_scope_rows=1000 if exactly else 3), event)
    finally:
        last = grants.begun
        grants.running[first] -= 1
    possible = grants.versions[first : last + 1]
    assert 1 <= len(possible) <= 2
    for passage in found["results"]:
        # What was revoked before the search began, or granted after it had ended, is in none of them.
        document = UUID(passage["document_id"])
        assert any(version[document].readers & event.readers for version in possible), event.about
    wanted = [stage.truth.result(event, version) for version in possible]
    seen["events"] += 1
    seen["passages"] += found["k_returned"]
    if wanted[0] == wanted[-1]:
        assert found == wanted[0], f"{differences(found, wanted[0])}\n{event.about}"
        seen["a change in the middle that concerns another"] += len(possible) - 1
    elif found in wanted:
        seen["as before the change" if found == wanted[0] else "as after the change"] += 1
    else:
        # Two arms are two statements, and under `skip` one may be searched again: each has a snapshot of its own, so
        # what is granted meanwhile may be in one alone. Nothing else can be in between.
        message = "\n".join(differences(found, one) for one in wanted)
        profile = ALIASES.get(event.json["profile"], event.json["profile"])
        assert event.topic is not None or profile == "packing", f"{message}\n{event.about}"
        seen["one arm as before, one as after"] += 1


async def test_each_result_is_as_before_or_as_after_a_change_of_grants(
    database: Database, figures: Callable[[str], None], seed: int
) -> None:
    print(f"DIFFERENTIAL_SEED={seed}")
    world = World(seed, families_keep_together=True)
    seen: Counter[str] = Counter()
    async with staged(database, world) as stage:
        grants = Grants(stage, random.Random(seed + 1), [world.corpus.documents])

        def event() -> Event:
            made = world.event(world.rng.choice(ORDINARY), *world.rng.choice([[]] * 5 + [["trip:slow"]]))
            return made.but(filters=None, token_budget=None, k=15)

        def satisfied() -> bool:
            return (
                grants.committed > 25 and min(seen["as before the change"], seen["as after the change"]) > 10
            )

        events = enough(event, EVENTS_AMID_CHANGES, satisfied)

        async def ask() -> None:
            for event in events:
                await search_amid_changes(grants, event, seen)

        changing = asyncio.create_task(grants.keep_changing())
        began = perf_counter()
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(CONNECTIONS + 1):
                    group.create_task(ask())
        finally:
            changing.cancel()
            with suppress(asyncio.CancelledError):
                await changing
        seconds = perf_counter() - began
        await look_at_all(stage.store)
    figures(f"seed {seed}, {seconds:.1f} s, {grants.committed} changes, {dict(sorted(seen.items()))}")
    assert satisfied()
    assert seen["one arm as before, one as after"] < 0.02 * seen["events"]


def test_what_is_no_uuid_does_not_get_as_far_as_the_store() -> None:
    for text in HOSTILE:
        for name in ("event_id", "session_id", "topic_id"):
            with pytest.raises(ContractViolation):
                QueryEmbedding.parse(query([1.0] * 768) | {name: text})
