"""Searches in PostgreSQL, each in its own transaction with the requesting principals.

Belongs here: connections, transactions, statements, converting rows to values. Does not belong here: which searches to
run, or what to select from them. `streams.store.error_translation` translates every exception.
"""

import asyncio
import json
import math
import re
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
from streams.retrieval import ArmResult, Search, StoredPassage, StoredSize
from streams.store.error_translation import translate
from streams.store.reference import inline_functions

__all__ = ["MAX_TOKEN_COUNT", "PooledConnection", "PostgresStore"]

T = TypeVar("T")

# hnsw.ef_search: the size of the index's candidate list; pgvector's maximum is 1,000.
# 400 compensates for an index built with pgvector's default ef_construction; it costs about two milliseconds.
_EF_SEARCH, _MAX_EF_SEARCH = 400, 1000

# The index has to yield this multiple of the requested rows: if it starts in the wrong region, the nearest rows are not
# among the first.
_OVERFETCH_FACTOR = 4
# The maximum of additional rows, so that a large search does not exceed the index's scan limit.
_MAX_EXTRA_ROWS = 1000


#: A larger stored token count is an error: it would mean about ten megabytes of text. A result has at most a thousand
#: passages, so with this limit their sum, including headers, fits the contract's int32.
MAX_TOKEN_COUNT = 2_000_000


_FRAGMENT = re.compile(r"SELECT \$fragment\$\n(.*)\n\$fragment\$ AS (\w+) \\gset", re.DOTALL)
_STATEMENT = re.compile(r"(?:PREPARE \w+ AS\n)?(.*);", re.DOTALL)
# Where a fragment is inserted; `::` is a cast.
_INSERTED = re.compile(r"(?<!:):([a-z_]+)")


def _statements() -> dict[str, str]:
    """The statements of `queries.sql`, without what psql needs to prepare them."""
    parts = (files("streams.store") / "queries.sql").read_text(encoding="utf-8").split("-- name: ")[1:]
    fragments: dict[str, str] = {}
    statements: dict[str, str] = {}
    for name, _, text in (part.partition("\n") for part in parts):
        sql = re.sub(r"\A(--.*\n)*", "", text).strip()
        if fragment := _FRAGMENT.fullmatch(sql):
            fragments[fragment[2]] = fragment[1]
        elif statement := _STATEMENT.fullmatch(sql):
            statements[name] = statement[1]
        else:
            raise ValueError(f"queries.sql: {name} is neither a statement nor a fragment")

    def insert(match: re.Match[str]) -> str:
        return _INSERTED.sub(insert, fragments[match[1]])

    return {name: inline_functions(_INSERTED.sub(insert, sql)) for name, sql in statements.items()}


_SQL = _statements()

# A connection acquired from a pool.
PooledConnection = asyncpg.pool.PoolConnectionProxy


class PostgresStore:
    """The store that workers search.

    Args:
        dsn: any connection string that asyncpg accepts; passed on unchanged.
        connections: maximum number of connections; an event in flight uses two.
        search_timeout_seconds: timeout of one search, including the wait for a connection.
        principals_setting: the name of the setting that the row-level policies read.
        exact_scan_rows: scopes up to this size are searched exactly if the index scan stopped early.
        small_scope_rows: scopes up to this size are always searched exactly.
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
        """Create the pool. Opens no connection, so an unreachable server is not an error yet."""
        self._pool = await asyncpg.create_pool(
            self._dsn,
            min_size=0,
            max_size=self._connections,
            init=register_vector,
            # Principals and settings are local to each transaction, so nothing has to be reset: saves a round trip.
            reset=_nothing_to_reset,
            timeout=self._timeout,
            command_timeout=self._timeout,
            server_settings={"application_name": "anabranch"},
        )

    async def close(self, *, timeout_seconds: float) -> None:
        """Close every connection, forcibly if it does not close in time."""
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
        """Ping the server.

        Raises:
            TransientError: the server does not answer.
        """
        with _translated():
            async with asyncio.timeout(timeout_seconds), self._connection() as connection:
                await connection.execute(_SQL["probe"])

    async def inspect(self, inspection: Callable[[PooledConnection], Awaitable[T]]) -> T:
        """Run a preflight on one of the pool's connections, so that it sees what the searches will see."""
        with _translated():
            async with asyncio.timeout(self._timeout), self._connection() as connection:
                return await inspection(connection)

    async def search(self, search: Search) -> ArmResult:
        """Search one arm.

        Raises:
            TransientError: see `streams.store.error_translation`.
        """
        with _translated():
            async with asyncio.timeout(self._timeout) as limit:
                return await self._search(search, limit)

    async def sizes(self, principals: Sequence[str], chunk_ids: Sequence[UUID]) -> Mapping[UUID, StoredSize]:
        """Data, except the texts, of those chunks that the requesting principals may (still) read.

        Raises:
            TransientError: see `streams.store.error_translation`.
        """
        with _translated():
            async with (
                asyncio.timeout(self._timeout) as limit,
                self._transaction_as(principals, limit) as connection,
            ):
                rows = await _protected(connection, _SQL["sizes"], list(chunk_ids))
        return {
            row["id"]: StoredSize(
                _token_count(row["token_count"])[0], row["text_bytes"], row["file_description"]
            )
            for row in rows
        }

    async def passages(
        self, principals: Sequence[str], chunk_ids: Sequence[UUID]
    ) -> Mapping[UUID, StoredPassage]:
        """The passages of those chunks that the requesting principals may (still) read.

        Raises:
            TransientError: see `streams.store.error_translation`.
        """
        with _translated():
            async with (
                asyncio.timeout(self._timeout) as limit,
                self._transaction_as(principals, limit) as connection,
            ):
                rows = await _protected(connection, _SQL["passages"], list(chunk_ids))
        return {row["id"]: _passage(row) for row in rows}

    async def _search(self, search: Search, limit: asyncio.Timeout) -> ArmResult:
        """Search one arm: exactly if its scope is small enough to read, else through the vector index.

        The scope is the arm's rows that the principals may read and that meet the filters. An exact search stops one
        row above its bound: the scope is then larger, and the rows are discarded. The rows wanted from the index are
        four times the search's limit, but at most 1,000 more than the limit. In this order:

        step  runs if                         statement             bound (default)                  is the result if
        ----  ------------------------------  --------------------  -------------------------------  ----------------
        1     always                          search_exactly        small_scope_rows (1,000)         scope ≤ bound
        2     scope > bound of 1              search_approximately  1,000 tuples of the index        all wanted found
        3     2 found fewer rows than wanted  search_exactly        exact_scan_rows / 4 (5,000)      scope ≤ bound
        4     scope > bound of 3              search_approximately  hnsw.max_scan_tuples (20,000)    all wanted found
        5     4 found fewer rows than wanted  search_exactly        exact_scan_rows (20,000)         scope ≤ bound
        6     scope > bound of 5              none                  the rows that 4 found            always: truncated

        - No bound of an exact search is above exact_scan_rows, and the bound of 3 is never below the bound of 1. The
          bound of 2 is never above the server's hnsw.max_scan_tuples.
        - Steps 1 and 2 share a transaction, and so do 3 and 4. Step 5 has its own.
        - A result of 1, 3 or 5 is `complete` if the scope has no more rows than the limit. A result of 2, 4 or 6 never
          is. A truncated result has the warning `scan_truncated`.
        """
        scope = (search.session_id, search.topic_id, *_conditions(search.filters))
        arguments = (search.vector, *scope, search.limit, search.expand_parents)
        rows_wanted = min(_OVERFETCH_FACTOR * search.limit, search.limit + _MAX_EXTRA_ROWS)
        # Search a small scope exactly right away: this costs no more than an approximate search. If the index finds few
        # rows at first, the scope is a small part of the store or far from the query: reading it then costs no more
        # than continuing the index scan, and misses nothing.
        larger = max(self._small_scope_rows, self._exact_scan_rows // 4)
        for scope_rows, limited_scan in ((self._small_scope_rows, True), (larger, False)):
            async with self._transaction_as(
                search.principals, limit, rows_wanted=rows_wanted, limited_scan=limited_scan
            ) as connection:
                exactly = await _protected(connection, _SQL["search_exactly"], *arguments, scope_rows + 1)
                if (size := _rows_scanned(exactly)) <= scope_rows:
                    return ArmResult(_candidates(exactly), complete=size <= search.limit)
                rows = await _protected(connection, _SQL["search_approximately"], *arguments, rows_wanted)
            if _rows_scanned(rows) == rows_wanted:
                return ArmResult(_candidates(rows), complete=False)
        # The index scan reached its limit.
        async with self._transaction_as(search.principals, limit) as connection:
            exactly = await _protected(
                connection, _SQL["search_exactly"], *arguments, self._exact_scan_rows + 1
            )
        if (size := _rows_scanned(exactly)) <= self._exact_scan_rows:
            return ArmResult(_candidates(exactly), complete=size <= search.limit)
        return ArmResult(_candidates(rows), complete=False, truncated=True)

    @asynccontextmanager
    async def _transaction_as(
        self,
        principals: Sequence[str],
        limit: asyncio.Timeout,
        *,
        rows_wanted: int = 0,
        limited_scan: bool = False,
    ) -> AsyncIterator[PooledConnection]:
        """A transaction in which the row-level policies see these principals.

        Args:
            principals: the requesting principals.
            limit: when the caller gives up; the server's timeout is the time left until then.
            rows_wanted: how many rows an approximate search has to find.
            limited_scan: whether the index scan stops early.
        """
        async with self._connection() as connection:
            await connection.execute(_SQL["begin"])
            await connection.fetch(
                _SQL["settings"],
                self._setting,
                json.dumps(list(principals)),
                str(_milliseconds_left(limit)),
                str(min(max(_EF_SEARCH, rows_wanted), _MAX_EF_SEARCH)),
                limited_scan,
            )
            yield connection
            await connection.execute(_SQL["commit"])

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[PooledConnection]:
        """A pooled connection that is returned to the pool only in a known state.

        On any error, including cancellation, the connection is closed, not reset: no principal can remain on it, and
        nothing waits for a server that does not answer.
        """
        pool = self._pool  # `close` may clear it while this search is still ending
        if pool is None:
            raise asyncpg.InterfaceError("the pool is not open")
        connection = await pool.acquire()
        try:
            yield connection
        except BaseException:
            # If the server has closed the connection, the pool has already discarded it; keep the original error.
            with suppress(asyncpg.InterfaceError):
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


def _milliseconds_left(limit: asyncio.Timeout) -> int:
    """At least 1: zero would mean no limit."""
    when = limit.when()
    if when is None:
        raise ValueError("the search has no deadline")
    return max(1, math.ceil((when - asyncio.get_running_loop().time()) * 1000))


async def _nothing_to_reset(connection: asyncpg.Connection) -> None:
    del connection


class _translated:  # noqa: N801  # reads as a verb in `with`
    """Translates every exception from asyncpg; unexpected ones pass through."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        if isinstance(error, ValueError) and "unknown type: public.vector" in str(error):
            raise StoreMisconfigured("the extension vector is missing; run `anabranch migrate`") from error
        fault = translate(error)
        if isinstance(fault, StoreMisconfigured) and fault.before_connect:
            raise fault from None  # the original exception quotes the connection string
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
    """Number of rows of the scope that a search has read; 0 if the answer is empty."""
    return int(rows[0]["rows_scanned"]) if rows else 0


def _passage(row: asyncpg.Record) -> StoredPassage:
    coordinates, invalid = _coordinates(row["coordinates"])
    tokens, impossible = _token_count(row["token_count"])
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
        invalid=invalid or impossible or row["metadata_invalid"],
    )


def _token_count(stored: int | None) -> tuple[int | None, bool]:
    """The stored token count, or None if it is missing or invalid; and whether it is invalid."""
    if stored is None or 0 <= stored <= MAX_TOKEN_COUNT:
        return stored, False
    return None, True


def _coordinates(text: str | None) -> tuple[dict[str, float] | None, bool]:
    """A map of strings to finite numbers, or None if it is missing or invalid; and whether it is invalid."""
    if text is None:
        return None, False
    try:
        value = json.loads(text)
        if value is None:
            return None, False
        numbers = {key: _finite(number) for key, number in value.items()}
    except (AttributeError, ValueError, OverflowError):
        # Not an object, non-finite numbers, or an integer with more digits than Python converts.
        return None, True
    return numbers, False


def _finite(number: object) -> float:
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not math.isfinite(number):
        raise ValueError("not a finite number")
    return float(number)
