"""Searches in PostgreSQL, each in its own transaction with the requesting principals.

Belongs here: connections, transactions, statements, converting rows to values. Does not belong here: which searches to
run, or what to select from them. `streams.store.error_translation` translates every exception.
"""

import asyncio
import json
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar, cast
from uuid import UUID

import asyncpg
from pgvector.asyncpg import register_vector

from streams.core.errors import StoreMisconfigured
from streams.core.selection import Candidate
from streams.retrieval import ArmResult, Search, StoredPassage, StoredSize
from streams.store.catalog import vector_schema
from streams.store.error_translation import translate
from streams.store.filters import conditions
from streams.store.replication import LAG_SECONDS, LagLimit, ReplicaConnection, lag_seconds
from streams.store.vector_index import EF_SEARCH, VectorIndex, read_vector_index

__all__ = ["MAX_TOKEN_COUNT", "PooledConnection", "PostgresStore"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: A larger stored token count is an error: it would mean about ten megabytes of text. A result has at most a thousand
#: passages, so with this limit their sum, including headers, fits the contract's int32.
MAX_TOKEN_COUNT = 2_000_000


# Every statement that a worker sends. Values are bound. Each parameter has a type, so that no other function of that
# name is called. {vector} is the type of pgvector, with its schema.
_SQL = {
    "search": """
        SELECT * FROM public.anabranch_search(
          $1::text, $2::{vector}, $3::uuid, $4::uuid, $5::text, $6::text, $7::text, $8::jsonb, $9::int, $10::bool,
          $11::int, $12::int, $13::bool, $14::int, $15::int)
    """,
    "search_passages": """
        SELECT * FROM public.anabranch_search_passages(
          $1::text, $2::{vector}, $3::uuid, $4::uuid, $5::text, $6::text, $7::text, $8::jsonb, $9::int,
          $10::int, $11::int, $12::bool, $13::int, $14::int)
    """,
    "passages": "SELECT * FROM public.anabranch_passages($1::text, $2::uuid[], $3::int)",
    "sizes": "SELECT * FROM public.anabranch_sizes($1::text, $2::uuid[], $3::int)",
    # A ping of the tables that searches read: it blocks if one of them is locked. LIMIT 0 reads no rows.
    "probe": f"""
        SELECT {LAG_SECONDS} AS lag_seconds
        FROM (SELECT) ping LEFT JOIN (
          SELECT FROM public.document_chunks, public.documents, public.chunk_topics, public.chunk_metadata,
                      public.access_sets
          LIMIT 0
        ) tables ON true
    """,  # noqa: S608  # a constant
}

# How long to wait for the server to cancel a statement.
_CANCEL_SECONDS = 1.0
# A server has read a statement after this time.
_CANCEL_DELAY_SECONDS = 0.1

# A search ends before this time has passed after its deadline, unless its worker has disappeared.
_BACKSTOP_SECONDS = 1.0
# How often a server checks during a statement whether the client is still connected.
_CLIENT_CHECK_MS = 250

# A connection acquired from a pool.
PooledConnection = asyncpg.pool.PoolConnectionProxy


class PostgresStore:
    """The store that workers search.

    Args:
        dsn: any connection string that asyncpg accepts; passed on unchanged.
        connections: maximum number of connections; an event in flight uses two.
        search_timeout_seconds: timeout of one search, including the wait for a connection.
        exact_scan_rows: scopes up to this size are searched exactly if the index scan stopped early.
        small_scope_rows: scopes up to this size are always searched exactly.
        statement_cache_size: how many prepared statements each connection keeps; 0 for a pooler that does not support
            them. Then each statement takes two round trips.
        max_replication_lag_seconds: a replica that may be further behind is not searched.
        application_name: what ``pg_stat_activity`` shows.
    """

    def __init__(
        self,
        dsn: str,
        *,
        connections: int,
        search_timeout_seconds: float,
        exact_scan_rows: int,
        small_scope_rows: int = 1000,
        statement_cache_size: int = 100,
        max_replication_lag_seconds: float = 60.0,
        application_name: str = "anabranch",
    ) -> None:
        self._dsn = dsn
        self._connections = connections
        self._timeout = search_timeout_seconds
        self._exact_scan_rows = exact_scan_rows
        self._small_scope_rows = min(small_scope_rows, exact_scan_rows)
        self._statement_cache_size = statement_cache_size
        self._application_name = application_name
        self._lag_limit = LagLimit(max_replication_lag_seconds)
        # Both are read again on each new connection; `_vector` is pgvector's type.
        self._index = VectorIndex(by_halfvec=True)
        self._vector = ""
        self._accepts_limits = True
        self._closing: set[asyncio.Task[None]] = set()
        self._pool: asyncpg.Pool | None = None

    async def open(self) -> None:
        """Create the pool. Opens no connection, so an unreachable server is not an error yet."""
        self._pool = await asyncpg.create_pool(
            self._dsn,
            min_size=0,
            max_size=self._connections,
            init=self._initialize,
            connection_class=ReplicaConnection,
            # Principals and settings are local to each transaction, so nothing has to be reset: saves a round trip.
            reset=_nothing_to_reset,
            timeout=self._timeout,
            statement_cache_size=self._statement_cache_size,
            connect=self._connect,
        )

    async def _connect(self, *args: Any, **options: Any) -> asyncpg.Connection:
        """Connect, and let the server itself end a statement that nobody can cancel any more, if it accepts that.

        A pooler may reject these settings. They hold for statements that begin later, so a search cannot make them.
        """
        name = {"application_name": self._application_name}
        limits = {
            "statement_timeout": str(math.ceil(1000 * (self._timeout + _BACKSTOP_SECONDS))),
            "client_connection_check_interval": str(_CLIENT_CHECK_MS),
        }
        if self._accepts_limits:
            try:
                return await asyncpg.connect(*args, server_settings=name | limits, **options)
            except (
                asyncpg.ProtocolViolationError,
                asyncpg.InvalidParameterValueError,
                asyncpg.UndefinedObjectError,
            ):
                self._accepts_limits = False
                logger.warning(
                    "the database server does not accept statement_timeout and client_connection_check_interval"
                    " when a connection is opened; behind a pooler, set them for the worker's role"
                )
        return await asyncpg.connect(*args, server_settings=name, **options)

    async def _initialize(self, connection: asyncpg.Connection) -> None:
        """Read the vector index, and load all types that statements use.

        Otherwise asyncpg loads an array type when a statement first uses it, and changes `jit` for the session
        meanwhile: behind a pooler, on another server connection, it would not restore it.
        """
        async with connection.transaction():
            await register_vector(connection, schema=await vector_schema(connection, for_sql=False))
            self._vector = f"{await vector_schema(connection)}.vector"
            await connection.prepare(
                "SELECT $1::uuid[], $2::text[], $3::float8[], $4::bool[], $5::int4[], $6::int8[]"
            )
            self._index = await read_vector_index(connection)

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
        await asyncio.gather(*self._closing)

    def connections(self) -> Iterable[tuple[str, int]]:
        """(state, connections), for the metric."""
        size = idle = 0
        if self._pool is not None:
            size, idle = self._pool.get_size(), self._pool.get_idle_size()
        return (("idle", idle), ("busy", size - idle))

    def replication_lag_seconds(self) -> float:
        """For the metric: 0 on a primary; infinite if a replica cannot tell; NaN before the first probe."""
        return self._lag_limit.seconds

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
        """Ping the server, and measure its replication lag.

        Raises:
            TransientError: the server does not answer, or is a replica that lags too much.
        """
        with _translated():
            async with asyncio.timeout(timeout_seconds), self._connection(check_lag=False) as connection:
                self._check_lag(connection, await connection.fetchval(_SQL["probe"]))

    async def inspect(self, inspection: Callable[[PooledConnection], Awaitable[T]]) -> T:
        """Run a preflight on one of the pool's connections, so that it sees what the searches will see."""
        with _translated():
            async with asyncio.timeout(self._timeout), self._connection() as connection:
                self._index = await read_vector_index(connection)
                return await inspection(connection)

    async def search(self, search: Search) -> ArmResult:
        """Search one arm.

        Raises:
            TransientError: see `streams.store.error_translation`.
        """
        return await self._search(search, self._small_scope_rows, self._exact_scan_rows)

    async def search_exactly(self, search: Search, *, max_rows: int, timeout_seconds: float) -> ArmResult:
        """Search one arm by reading its whole scope.

        If the scope has more than `max_rows` rows, the result is truncated and has no candidates.

        Raises:
            TransientError: see `streams.store.error_translation`.
        """
        return await self._search(search, max_rows, max_rows, by_index=False, timeout_seconds=timeout_seconds)

    async def _search(
        self,
        search: Search,
        *bounds: int | None,
        by_index: bool = True,
        timeout_seconds: float | None = None,
    ) -> ArmResult:
        if not by_index:
            bounds += (None, EF_SEARCH)  # exactly or not at all
        scope = (
            search.vector,
            search.session_id,
            search.topic_id,
            *conditions(search.filters),
            search.limit,
        )
        if search.with_passages:
            rows = await self._call(
                "search_passages",
                search.principals,
                *scope,
                *bounds,
                by_index=by_index,
                timeout_seconds=timeout_seconds,
            )
            found = [row for row in rows if row["id"] is not None]
            return ArmResult(
                [Candidate(row["id"], row["distance"]) for row in found],
                complete=rows[0]["complete"],
                truncated=rows[0]["truncated"],
                exact=rows[0]["exact"],
                passages={row["id"]: _passage(row) for row in found},
            )
        [row] = await self._call(
            "search",
            search.principals,
            *scope,
            search.expand_parents,
            *bounds,
            by_index=by_index,
            timeout_seconds=timeout_seconds,
        )
        ids, distances = row["ids"] or (), row["distances"] or ()
        if row["parent_ids"] is None:
            candidates = [Candidate(*found) for found in zip(ids, distances, strict=True)]
        else:
            parents = row["parent_ids"], row["parents_missing"]
            candidates = [Candidate(*found) for found in zip(ids, distances, *parents, strict=True)]
        return ArmResult(candidates, complete=row["complete"], truncated=row["truncated"], exact=row["exact"])

    async def sizes(self, principals: Sequence[str], chunk_ids: Sequence[UUID]) -> Mapping[UUID, StoredSize]:
        """Data, except the texts, of those chunks that the requesting principals may (still) read.

        Raises:
            TransientError: see `streams.store.error_translation`.
        """
        return {
            row["id"]: StoredSize(
                _token_count(row["token_count"])[0], row["text_bytes"], row["file_description"]
            )
            for row in await self._call("sizes", principals, chunk_ids)
        }

    async def passages(
        self, principals: Sequence[str], chunk_ids: Sequence[UUID]
    ) -> Mapping[UUID, StoredPassage]:
        """The passages of those chunks that the requesting principals may (still) read.

        Raises:
            TransientError: see `streams.store.error_translation`.
        """
        return {row["id"]: _passage(row) for row in await self._call("passages", principals, chunk_ids)}

    async def _call(
        self,
        name: str,
        principals: Sequence[str],
        *values: object,
        by_index: bool = False,
        timeout_seconds: float | None = None,
    ) -> list[asyncpg.Record]:
        """Call a function for these principals, in a transaction of its own.

        Args:
            name: the statement's.
            principals: the requesting principals.
            values: the arguments.
            by_index: whether the function also takes how to search the vector index.
            timeout_seconds: used instead of the timeout of all searches.
        """
        with _translated():
            running: list[asyncio.Task[list[asyncpg.Record]]] = []
            async with (
                asyncio.timeout(timeout_seconds or self._timeout) as limit,
                self._connection(running=running) as connection,
            ):
                if by_index:  # known now: the first connection reads it
                    values += (self._index.by_halfvec, EF_SEARCH)
                arguments = (json.dumps(list(principals)), *values, _milliseconds_left(limit))
                statement = _SQL[name].format(vector=self._vector)
                running.append(asyncio.create_task(connection.fetch(statement, *arguments)))
                return await asyncio.shield(running[0])

    @asynccontextmanager
    async def _connection(
        self, *, check_lag: bool = True, running: Sequence[asyncio.Task[list[asyncpg.Record]]] = ()
    ) -> AsyncIterator[PooledConnection]:
        """A pooled connection that is returned to the pool only in a known state, and not to a replica that lags.

        On any error, including cancellation, the connection is closed, not reset: no principal can remain on it.
        Closing also cancels the statement on the server; nobody waits for that.
        """
        pool = self._pool  # `close` may clear it while this search is still ending
        if pool is None:
            raise asyncpg.InterfaceError("the pool is not open")
        connection = await pool.acquire()
        try:
            if check_lag and not _unwrapped(connection).lag_is_known(asyncio.get_running_loop().time()):
                self._check_lag(connection, await lag_seconds(_unwrapped(connection)))
            yield connection
        except BaseException:
            closing = asyncio.create_task(self._discard(pool, connection, running))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
            raise
        await pool.release(connection)

    def _check_lag(self, connection: PooledConnection, seconds: float) -> None:
        now = asyncio.get_running_loop().time()
        self._lag_limit.check(seconds, now)
        _unwrapped(connection).lag_was_measured(now)

    async def _discard(
        self,
        pool: "asyncpg.Pool[asyncpg.Record]",
        connection: PooledConnection,
        running: Sequence[asyncio.Task[list[asyncpg.Record]]],
    ) -> None:
        if running:
            # A cancel request has no effect if it arrives before the statement has begun, which nothing would end then.
            await asyncio.wait(running, timeout=_CANCEL_DELAY_SECONDS)
            for statement in running:
                statement.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        # The server may have closed the connection, or may not answer; asyncpg then closes its end.
        with suppress(asyncpg.InterfaceError, asyncpg.InternalClientError, asyncpg.PostgresError, OSError):
            await connection.close(timeout=_CANCEL_SECONDS)
        await pool.release(connection)


def _unwrapped(connection: PooledConnection) -> ReplicaConnection:
    """The connection with its own type: the pool's proxy passes on all attributes."""
    return cast("ReplicaConnection", connection)


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
