"""What a connection to the store is connected to."""

from dataclasses import dataclass

from streams.store.catalog import UNREADABLE, Connection, read_catalog

__all__ = ["StoreFacts", "store_facts"]


@dataclass(frozen=True)
class StoreFacts:
    """The server, the database and the role of a connection.

    Attributes:
        postgresql: the server's version.
        pgvector: its version; None: not installed.
        schema: the version of the store's schema; 0: there is none; None: the role may not read it.
        database: its name.
        role: the current role.
        address: the server's ``host:port``, as it knows it; None: a Unix socket.
    """

    postgresql: str
    pgvector: str | None
    schema: int | None
    database: str
    role: str
    address: str | None


async def store_facts(connection: Connection) -> StoreFacts:
    """Read the facts, as any role."""
    [row] = await connection.fetch(
        "SELECT current_setting('server_version') AS postgresql,"
        "       (SELECT extversion FROM pg_extension WHERE extname = 'vector') AS pgvector,"
        "       current_database()::text AS database, current_user::text AS role,"
        "       host(inet_server_addr()) AS host, inet_server_port() AS port"
    )
    catalog = await read_catalog(connection)
    return StoreFacts(
        row["postgresql"],
        row["pgvector"],
        None if catalog.version == UNREADABLE else catalog.version,
        row["database"],
        row["role"],
        None if row["host"] is None else f"{row['host']}:{row['port']}",
    )
