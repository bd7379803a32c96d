"""What each exception of the driver means for an event.

Every class that asyncpg can raise is walked, so that a new release of it cannot bring one that nobody looked at.
"""

import errno
import inspect
import socket
import ssl
from asyncio import IncompleteReadError
from collections.abc import Iterator

import asyncpg
import pytest
from asyncpg import exceptions

from streams.core.errors import SearchTimeout, StoreMisconfigured, StoreUnavailable, TransientError
from streams.store.error_translation import translate

SECRET = "canary-7c1d"  # as a server's message quotes values

Meaning = type[TransientError] | None

# The class of a SQLSTATE, where all of it means one thing. What is not here, nobody foresees.
BY_CLASS: dict[str, Meaning] = {
    "08": StoreUnavailable,  # connection exception
    "40": StoreUnavailable,  # deadlock, serialization failure
    "53": StoreUnavailable,  # out of connections, memory, disk
    "55": StoreUnavailable,  # a lock that is not available
    "57": StoreUnavailable,  # shutting down, starting up
    "58": StoreUnavailable,  # input and output
    "28": StoreMisconfigured,  # no such role, wrong password
    "3D": StoreMisconfigured,  # no such database
    "3F": StoreMisconfigured,  # no such schema
    # Statements are fixed and values bound: no event can break their syntax, names, types or rights.
    "42": StoreMisconfigured,
}
BY_STATE: dict[str, Meaning] = {
    "57014": SearchTimeout,  # statement_timeout
    "25P03": StoreUnavailable,  # the server closed a session that stood idle in a transaction
    "25P04": SearchTimeout,  # transaction_timeout
    "0A000": StoreMisconfigured,
    # A pooler gave the session to somebody else, prepared statements and all.
    "26000": StoreMisconfigured,
}
BY_TYPE: dict[type[BaseException], Meaning] = {
    exceptions.InvalidCachedStatementError: StoreUnavailable,  # shares 0A000 with a feature that is missing
    exceptions.ClientConfigurationError: StoreMisconfigured,  # a connection string that makes no sense
    exceptions.UnsupportedClientFeatureError: StoreMisconfigured,
    exceptions.UnsupportedServerFeatureError: StoreMisconfigured,
    exceptions.InterfaceError: StoreUnavailable,
    exceptions.InternalClientError: StoreUnavailable,
    exceptions.OutdatedSchemaCacheError: StoreUnavailable,
    exceptions.ProtocolError: StoreUnavailable,
    exceptions.TargetServerAttributeNotMatched: StoreUnavailable,  # no primary among the hosts, yet
}


def asyncpg_errors() -> Iterator[type[BaseException]]:
    for _, kind in inspect.getmembers(exceptions, inspect.isclass):
        if issubclass(kind, BaseException) and not issubclass(kind, Warning):
            yield kind


def meaning(kind: type[BaseException]) -> Meaning:
    if kind in BY_TYPE:
        return BY_TYPE[kind]
    state = getattr(kind, "sqlstate", None)
    if state is None:
        # The abstract ones; and a SQLSTATE that asyncpg has no class for, which is on the instance.
        assert issubclass(kind, asyncpg.PostgresError)
        return None
    return BY_STATE.get(state, BY_CLASS.get(state[:2]))


@pytest.mark.parametrize("kind", list(asyncpg_errors()))
def test_every_exception_of_asyncpg_means_what_the_specification_says(kind: type[BaseException]) -> None:
    translated = translate(kind(f"no such thing as {SECRET}"))
    assert (None if translated is None else type(translated)) is meaning(kind)
    assert SECRET not in str(translated)


def test_the_walk_meets_all_of_them() -> None:
    kinds = list(asyncpg_errors())
    assert len(kinds) > 200
    assert {meaning(kind) for kind in kinds} == {None, StoreUnavailable, StoreMisconfigured, SearchTimeout}


@pytest.mark.parametrize(
    ("state", "expected"),
    [("53999", StoreUnavailable), ("42999", StoreMisconfigured), ("22999", None), ("XX999", None)],
)
def test_a_state_that_asyncpg_has_no_class_for_is_judged_by_its_first_two_letters(
    state: str, expected: Meaning
) -> None:
    fields = {"S": "ERROR", "V": "ERROR", "C": state, "M": SECRET}
    error = asyncpg.PostgresError.new(fields)  # as the protocol makes them
    assert error.sqlstate == state
    translated = translate(error)
    assert (None if translated is None else type(translated)) is expected


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("25P04", SearchTimeout),
        ("57P01", StoreUnavailable),
        ("25P03", StoreUnavailable),
        ("XX000", StoreUnavailable),  # whatever it is, the connection is lost
        (None, StoreUnavailable),
    ],
)
def test_a_connection_that_the_server_closed_is_judged_by_the_servers_reason(
    state: str | None, expected: Meaning
) -> None:
    error = exceptions.ConnectionDoesNotExistError(f"connection was closed: {SECRET}")
    if state is not None:  # as the protocol makes them
        error.__cause__ = asyncpg.PostgresError.new({"S": "FATAL", "V": "FATAL", "C": state, "M": SECRET})
    translated = translate(error)
    assert type(translated) is expected
    assert SECRET not in str(translated)


@pytest.mark.parametrize(
    "error",
    [
        ConnectionRefusedError(errno.ECONNREFUSED, SECRET),
        ConnectionResetError(SECRET),
        BrokenPipeError(SECRET),
        OSError(errno.EHOSTUNREACH, SECRET),
        FileNotFoundError(errno.ENOENT, SECRET),  # a Unix socket that is not there
        socket.gaierror(socket.EAI_NONAME, SECRET),
        ssl.SSLError(SECRET),
        IncompleteReadError(b"", 5),
        EOFError(SECRET),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_socket_that_fails_is_a_store_that_is_not_there(error: BaseException) -> None:
    translated = translate(error)
    assert type(translated) is StoreUnavailable
    assert SECRET not in str(translated)


def test_a_certificate_that_is_not_to_be_trusted_is_for_an_operator_to_fix() -> None:
    translated = translate(ssl.SSLCertVerificationError(SECRET))  # also an OSError, and a ValueError
    assert type(translated) is StoreMisconfigured
    assert SECRET not in str(translated)


def test_a_timeout_is_a_timeout_though_it_is_also_an_os_error() -> None:
    assert type(translate(TimeoutError())) is SearchTimeout
    assert type(translate(TimeoutError(errno.ETIMEDOUT, "connect"))) is SearchTimeout


@pytest.mark.parametrize(
    "error",
    [ValueError(SECRET), KeyError(SECRET), TypeError(SECRET), asyncpg.DataError(SECRET), RuntimeError()],
)
def test_what_is_not_the_drivers_nobody_foresaw(error: BaseException) -> None:
    # asyncpg refuses an argument that it cannot encode with DataError: one event's own doing.
    assert translate(error) is None


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        (asyncpg.UndefinedTableError, "anabranch migrate"),
        (asyncpg.UndefinedColumnError, "anabranch check"),
        (asyncpg.InvalidCatalogNameError, "check the name at the end of DATABASE_CONNECTION_STRING"),
        (asyncpg.InsufficientPrivilegeError, "anabranch_reader"),
        (asyncpg.UndefinedFunctionError, "pgvector"),
        (asyncpg.DatatypeMismatchError, "anabranch check"),
        (asyncpg.InvalidSQLStatementNameError, "pooler"),
        (asyncpg.DuplicatePreparedStatementError, "pooler"),
        (asyncpg.InvalidPasswordError, "DATABASE_CONNECTION_STRING"),
        (exceptions.ClientConfigurationError, "DATABASE_CONNECTION_STRING"),
    ],
)
def test_a_misconfiguration_names_its_remedy(kind: type[BaseException], remedy: str) -> None:
    translated = translate(kind(SECRET))
    assert remedy in str(translated)
    assert "\n" not in str(translated)
