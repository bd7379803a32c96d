"""The only place that maps a driver's exception to its meaning for an event."""

import re

import asyncpg

from streams.core.errors import SearchTimeout, StoreMisconfigured, StoreUnavailable, TransientError
from streams.network_errors import connection_problem
from streams.store.connect_errors import explain

__all__ = ["translate"]

# SQLSTATE classes and codes, from PostgreSQL's appendix A.
_UNAVAILABLE_CLASSES = frozenset(
    {
        "08",  # connection exception
        "40",  # transaction rollback: deadlock, serialization failure
        "53",  # insufficient resources: connections, memory, disk
        "55",  # object not in prerequisite state: a lock that is not available
        "57",  # operator intervention: shutdown, starting up
        "58",  # system error: I/O
    }
)
_REFUSED_LOGIN = "login rejected; check DATABASE_CONNECTION_STRING"
_MISCONFIGURED_CLASSES = {
    "28": _REFUSED_LOGIN,  # role or password
    "3F": _REFUSED_LOGIN,  # no such schema
    # Statements are constant and values are bound: no event can cause an error in syntax, names, types or rights.
    "42": "the schema is not the expected one; run `anabranch check`",
}
_OUT_OF_TIME = {
    "57014": "PostgreSQL cancelled the search (statement timeout)",
    "25P04": "PostgreSQL ended the search's session (transaction timeout)",
}
_IDLE_IN_TRANSACTION = "25P03"
_POOLER = (
    "the connection pooler does not support prepared statements; set ANABRANCH_STATEMENT_CACHE_SIZE=0,"
    " or configure the pooler to support them (PgBouncer 1.21 or later: max_prepared_statements)"
)
_MISCONFIGURED = {
    "42P01": "a table is missing; run `anabranch migrate`",
    "42703": "a column is missing; run `anabranch check`, which names it and the remedy",
    "42883": "a function or operator is missing; is pgvector installed? run `anabranch check`",
    "42704": "a type or setting is missing; is pgvector installed? run `anabranch check`",
    "42501": "permission denied; grant anabranch_reader to the worker's role, then run `anabranch check`",
    # Raised by anabranch_require_row_security.
    "AB001": "row-level security is not active for this role on every table, so no rows were returned; run"
    " `anabranch check` for the reason, or `anabranch migrate` to enable it",
    "0A000": "the server lacks a feature; run `anabranch check`",
    "26000": _POOLER,
    "42P05": _POOLER,
}
# What pgvector says of vectors that do not fit together. An event's components were counted before. Not the SQLSTATE
# alone: asyncpg uses it for values that it cannot encode.
_DIMENSIONS = re.compile(r"different \w+ dimensions \d+ and \d+|expected \d+ dimensions, not \d+")
_DRIVER_REFUSES = (
    asyncpg.exceptions.ClientConfigurationError,
    asyncpg.exceptions.UnsupportedClientFeatureError,
    asyncpg.exceptions.UnsupportedServerFeatureError,
)


def translate(error: BaseException) -> TransientError | None:
    """Translate an exception from asyncpg (or the socket below it).

    Returns:
        The matching transient error, or None for an unexpected exception. The text never quotes the statement's values.
    """
    if (refused := explain(error)) is not None:
        return refused
    if isinstance(error, TimeoutError):
        return SearchTimeout("the search took longer than its timeout")
    if isinstance(error, asyncpg.PostgresError):
        return _from_server(error)
    if isinstance(error, _DRIVER_REFUSES):
        return StoreMisconfigured(
            f"the driver cannot connect ({type(error).__name__}); check DATABASE_CONNECTION_STRING"
        )
    if isinstance(error, (asyncpg.InterfaceError, asyncpg.InternalClientError, OSError, EOFError)):
        # Connection refused, reset, unreachable or closed by the server.
        return StoreUnavailable(f"PostgreSQL is unreachable ({connection_problem(error)})")
    return None


def _from_server(error: asyncpg.PostgresError) -> TransientError | None:
    # The cause is the server's reason, if it gave one before it closed the connection.
    if (
        isinstance(error, asyncpg.ConnectionDoesNotExistError)
        and isinstance(error.__cause__, asyncpg.PostgresError)
        and (reason := _from_server(error.__cause__)) is not None
    ):
        return reason
    state = error.sqlstate or ""
    if isinstance(
        error, asyncpg.InvalidCachedStatementError
    ):  # before the SQLSTATE, which is misleading here
        return StoreUnavailable("the schema changed under a prepared statement")
    if state in _OUT_OF_TIME:
        return SearchTimeout(_OUT_OF_TIME[state])
    remedy = _MISCONFIGURED.get(state) or _MISCONFIGURED_CLASSES.get(state[:2])
    if _DIMENSIONS.fullmatch(str(error)):
        remedy = f"{error}: the store is not for ANABRANCH_EMBEDDING_DIMENSIONS; run `anabranch check`"
    if remedy:
        return StoreMisconfigured(f"PostgreSQL error {state}: {remedy}")
    if state[:2] in _UNAVAILABLE_CLASSES or state == _IDLE_IN_TRANSACTION:
        return StoreUnavailable(f"PostgreSQL error {state} ({type(error).__name__})")
    return None
