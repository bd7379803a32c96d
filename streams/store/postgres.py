"""Searches in PostgreSQL, each in a transaction of its own that knows who asks.

What may live here: connections, transactions, statements, rows to values. Not: which searches are made, or what is
selected from them. Every exception leaves through `streams.store.error_translation`.
"""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from importlib.resources import files
from itertools import chain
from typing import TypeVar
from uuid import UUID

import asyncpg
from pgvector.asyncpg import register_vector

from streams.core.errors import StoreMisconfigured
from streams.core.messages import Filters
from streams.core.selection import Candidate
from streams.retrieval import ArmResult, Search, StoredPassage
from streams.store.error_translation import translate

__all__ = ["PooledConnection", "PostgresStore"]

T = TypeVar("T")

# hnsw.ef_search: how many candidates the index keeps in sight; pgvector takes no more than 1,000.
# 400 makes up for an index that was built with pgvector's own ef_construction; it costs some two milliseconds.
_EF_SEARCH, _MAX_EF_SEARCH = 400, 1000

# How many times as many rows as asked for the index has to yield: where it looks in the wrong region first, the nearest
# are not among the first.
_OVERFETCH_FACTOR = 4
# No more than this besides what was asked for, lest a wide search be one that the index gives up.
_MAX_EXTRA_ROWS = 1000


def _statements() -> dict[str, str]:
    parts = (files("streams.store") / "queries.sql").read_text(encoding="utf-8").split("-- name: ")[1:]
    texts = {name.strip(): text.strip() for name, _, text in (part.partition("\n") for part in parts)}
    fragments = ("scope", "candidates", "filters", "described", "protected")  # each may hold those after it
    for fragment in fragments:
        texts = {name: text.replace(f"{{{fragment}}}", texts[fragment]) for name, text in texts.items()}
    return {name: text for name, text in texts.items() if name not in fragments}


_SQL = _statements()

# What a pool hands out.
PooledConnection = asyncpg.pool.PoolConnectionProxy


class PostgresStore:
    """The store that workers search.

    Args:
        dsn: any connection string that asyncpg takes, passed through unparsed.
        connections: most connections at a time; an event in work uses two.
        search_timeout_seconds: of one search, waiting for a connection included.
        principals_setting: the name of the setting that the row-level policies read.
        exact_scan_rows: scopes up to this size are searched exactly where the index stopped early.
        small_scope_rows: scopes up to this size are searched exactly in the first place.
    """

    def __init__(
        self,
        dsn: str,
        *,
        connections: int,
        search_timeout_seconds: float,
        principals_setting: str,
        exact_scan_rows: int,
        small_scope_rows: int = 1000,
    ) -> None:
        self._dsn = dsn
        self._connections = connections
        self._timeout = search_timeout_seconds
        self._setting = principals_setting
        self._exact_scan_rows = exact_scan_rows
        self._small_scope_rows = min(small_scope_rows, exact_scan_rows)
        self._pool: asyncpg.Pool | None = None

    async def open(self) -> None:
        """Make the pool; no connection is opened, so an absent server is no error yet."""
        self._pool = await asyncpg.create_pool(
            self._dsn,
            min_size=0,
            max_size=self._connections,
            init=register_vector,
            # Principals and knobs are local to each transaction, so there is nothing to reset: a round trip saved.
            reset=_nothing_to_reset,
            timeout=self._timeout,
            command_timeout=self._timeout,
            server_settings={"application_name": "anabranch"},
        )

    async def close(self, *, timeout_seconds: float) -> None:
        """Close every connection, by force where one does not close in time."""
        if self._pool is None:
            return
        pool, self._pool = self._pool, None
        try:
            async with asyncio.timeout(timeout_seconds):
                await pool.close()
        except TimeoutError:
            pool.terminate()

    def connections(self) -> Iterable[tuple[str, int]]:
        """(state, connections), for the metric."""
        size = idle = 0
        if self._pool is not None:
            size, idle = self._pool.get_size(), self._pool.get_idle_size()
        return (("idle", idle), ("busy", size - idle))

    async def warm_up(self) -> None:
        """Open all connections now, so that the first events do not have to wait.

        Raises:
            TransientError: not all connections could be opened; the others are in the pool and idle.
        """
        all_connected = asyncio.Barrier(self._connections)

        async def one() -> None:
            try:
                async with self._connection() as connection:
                    await connection.execute(_SQL["probe"])
                    # Hold each connection until all are open: else one would serve all. If one fails, stop waiting.
                    with suppress(asyncio.BrokenBarrierError):
                        await all_connected.wait()
            except Exception:
                await all_connected.abort()
                raise

        with _translated():
            async with asyncio.timeout(self._timeout):
                ends = await asyncio.gather(
                    *(one() for _ in range(self._connections)), return_exceptions=True
                )
            for end in ends:
                if isinstance(end, BaseException):
                    raise end

    async def probe(self, *, timeout_seconds: float) -> None:
        """Ask the server for a sign of life.

        Raises:
            TransientError: it gives none.
        """
        with _translated():
            async with asyncio.timeout(timeout_seconds), self._connection() as connection:
                await connection.execute(_SQL["probe"])

    async def inspect(self, inspection: Callable[[PooledConnection], Awaitable[T]]) -> T:
        """Run a preflight on one of the pool's own connections: what it sees is what the searches will see."""
        with _translated():
            async with asyncio.timeout(self._timeout), self._connection() as connection:
                return await inspection(connection)

    async def search(self, search: Search) -> ArmResult:
        """Search one arm.

        Raises:
            TransientError: as `streams.store.error_translation` says.
        """
        with _translated():
            async with asyncio.timeout(self._timeout):
                return await self._search(search)

    async def passages(
        self, principals: Sequence[str], chunk_ids: Sequence[UUID]
    ) -> Mapping[UUID, StoredPassage]:
        """The texts of those of the chunks that the asker may (still) read.

        Raises:
            TransientError: as `streams.store.error_translation` says.
        """
        with _translated():
            async with asyncio.timeout(self._timeout), self._transaction_as(principals) as connection:
                rows = await _protected(connection, _SQL["passages"], list(chunk_ids))
        return {row["id"]: _passage(row) for row in rows}

    async def _search(self, search: Search) -> ArmResult:
        scope = (search.session_id, search.topic_id, *_conditions(search.filters))
        asked = (search.vector, *scope, search.limit, search.expand_parents)
        rows_wanted = min(_OVERFETCH_FACTOR * search.limit, search.limit + _MAX_EXTRA_ROWS)
        # A small scope is searched exactly at once: that costs no more than an approximate search. Where the index
        # finds little at first, the scope is a small part of the store or lies away from the query: to read it costs
        # no more than to have the index go on, and misses nothing.
        larger = max(self._small_scope_rows, self._exact_scan_rows // 4)
        for scope_rows, limited_scan in ((self._small_scope_rows, True), (larger, False)):
            async with self._transaction_as(
                search.principals, rows_wanted=rows_wanted, limited_scan=limited_scan
            ) as connection:
                exactly = await _protected(connection, _SQL["search_exactly"], *asked, scope_rows + 1)
                if (size := _rows_scanned(exactly)) <= scope_rows:
                    return ArmResult(_candidates(exactly), complete=size <= search.limit)
                rows = await _protected(connection, _SQL["search_approximately"], *asked, rows_wanted)
            if _rows_scanned(rows) == rows_wanted:
                return ArmResult(_candidates(rows), complete=False)
        # The index gave up.
        async with self._transaction_as(search.principals) as connection:
            exactly = await _protected(connection, _SQL["search_exactly"], *asked, self._exact_scan_rows + 1)
        if (size := _rows_scanned(exactly)) <= self._exact_scan_rows:
            return ArmResult(_candidates(exactly), complete=size <= search.limit)
        return ArmResult(_candidates(rows), complete=False, truncated=True)

    @asynccontextmanager
    async def _transaction_as(
        self, principals: Sequence[str], *, rows_wanted: int = 0, limited_scan: bool = False
    ) -> AsyncIterator[PooledConnection]:
        """A transaction in which the row-level policies see these principals.

        Args:
            principals: who asks.
            to_find: how many rows an approximate search has to find.
            briefly: whether it gives up early.
        """
        async with self._connection() as connection:
            await connection.execute(_SQL["begin"])
            await connection.fetch(
                _SQL["settings"],
                self._setting,
                json.dumps(list(principals)),
                # The server's own limit: a client that gives up does not stop the server from searching on.
                str(math.ceil(self._timeout * 1000)),
                str(min(max(_EF_SEARCH, rows_wanted), _MAX_EF_SEARCH)),
                limited_scan,
            )
            yield connection
            await connection.execute(_SQL["commit"])

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[PooledConnection]:
        """A pooled connection that goes back only from a known state.

        Whatever goes wrong, cancellation included, the connection is closed rather than cleaned: no principal can
        survive on it, and a server that does not answer is not waited for.
        """
        pool = self._pool  # `close` forgets it, perhaps while this search is still ending
        if pool is None:
            raise asyncpg.InterfaceError("the pool is not open")
        connection = await pool.acquire()
        try:
            yield connection
        except BaseException:
            connection.terminate()
            raise
        finally:
            await pool.release(connection)


async def _protected(connection: PooledConnection, statement: str, *values: object) -> list[asyncpg.Record]:
    """The rows of a statement that includes the fragment `protected`.

    Raises:
        StoreMisconfigured: row-level security was not active, so the rows may not be allowed for these principals.
    """
    rows: list[asyncpg.Record] = await connection.fetch(statement, *values)
    if rows and not rows[0]["protected"]:
        raise StoreMisconfigured(
            "row-level security is not active for this role on every table, so all rows were discarded;"
            " run `anabranch check` for the reason, or `anabranch migrate` to enable it"
        )
    return rows


async def _nothing_to_reset(connection: asyncpg.Connection) -> None:
    del connection


class _translated:  # noqa: N801  # reads as a verb in `with`
    """Every exception that asyncpg can raise leaves as one of ours, or as what nobody foresaw."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        if isinstance(error, ValueError) and "unknown type: public.vector" in str(error):
            raise StoreMisconfigured("the extension vector is missing; run `anabranch migrate`") from error
        fault = translate(error)
        if isinstance(fault, StoreMisconfigured) and fault.before_connect:
            raise fault from None  # what it came from quotes the connection string
        if fault is not None:
            raise fault from error


def _conditions(filters: Filters | None) -> tuple[str | None, str | None, str | None, list[str] | None]:
    if filters is None:
        return (None, None, None, None)
    metadata = list(chain.from_iterable((filters.metadata or {}).items())) or None
    return (filters.section, filters.document_type, filters.source_url_prefix, metadata)


def _candidates(rows: Iterable[asyncpg.Record]) -> list[Candidate]:
    return [Candidate(row[0], row[1], row[2], row[3]) for row in rows]


def _rows_scanned(rows: Sequence[asyncpg.Record]) -> int:
    """Rows of the scope that a search has read; without a row in the answer there was none."""
    return int(rows[0]["rows_scanned"]) if rows else 0


def _passage(row: asyncpg.Record) -> StoredPassage:
    coordinates, invalid = _coordinates(row["coordinates"])
    tokens = row["token_count"]
    if tokens is not None and tokens < 0:
        tokens, invalid = None, True
    return StoredPassage(
        chunk_id=row["id"],
        document_id=row["document_id"],
        text_content=row["text_content"],
        token_count=tokens,
        page=row["page"],
        section=row["section"],
        chunk_position=row["chunk_position"],
        coordinates=coordinates,
        title=row["title"],
        source_url=row["source_url"],
        file_description=row["file_description"],
        metadata={} if row["metadata"] is None else json.loads(row["metadata"]),
        invalid=invalid or row["metadata_invalid"],
    )


def _coordinates(text: str | None) -> tuple[dict[str, float] | None, bool]:
    """A map of string to finite number; or nothing, and whether something else was there."""
    if text is None:
        return None, False
    try:
        value = json.loads(text)
        if value is None:
            return None, False
        numbers = {key: _finite(number) for key, number in value.items()}
    except (AttributeError, ValueError, OverflowError):
        # No object, no finite numbers, or an integer of more digits than Python converts.
        return None, True
    return numbers, False


def _finite(number: object) -> float:
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not math.isfinite(number):
        raise ValueError("no finite number")
    return float(number)
