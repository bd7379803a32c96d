"""The information about a store that its checks share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from streams.store.catalog import Catalog, Connection, read_catalog, vector_schema
from streams.store.reference import (
    SCHEMA_VERSION,
    TABLES,
    Kind,
    Statement,
    readable_columns,
    reference,
)

__all__ = ["StoreView", "load_view"]


@dataclass(frozen=True)
class StoreView:
    """A store as seen by the worker's role, and its desired state.

    Args:
        connection: logged in as the worker.
        setting: the setting in which the worker passes the requesting principals.
        dimensions: of the worker's embeddings.
        role: the connection's current role.
        catalog: the actual state.
        reference: the desired state, for the store's own dimensions.
    """

    connection: Connection
    setting: str
    dimensions: int
    role: str
    catalog: Catalog
    reference: Sequence[Statement]

    @cached_property
    def oids(self) -> Mapping[str, int]:
        """The existing tables."""
        return {name: found.oid for name, found in self.catalog.relations.items() if name in TABLES}

    @cached_property
    def policies(self) -> Mapping[tuple[str, str], Statement]:
        """The reference's, by table and name."""
        return {(policy.table, policy.name): policy for policy in self.of_kind("policy")}

    @cached_property
    def readable(self) -> Mapping[str, list[str]]:
        """The columns that a worker reads, by table."""
        return readable_columns(self.reference)

    @property
    def newer(self) -> bool:
        """Whether a newer release has migrated the store: definitions may differ, but this release can use it."""
        return self.catalog.version > SCHEMA_VERSION

    def of_kind(self, kind: Kind) -> list[Statement]:
        """The reference's statements of one kind."""
        return [statement for statement in self.reference if statement.kind == kind]


async def load_view(connection: Connection, principals_setting: str, dimensions: int) -> StoreView:
    """Read the catalogs."""
    catalog = await read_catalog(connection)
    # With the worker's, each object that depends on the dimensions would be reported as altered.
    stored = catalog.dimensions or dimensions
    return StoreView(
        connection,
        principals_setting,
        dimensions,
        await connection.fetchval("SELECT current_user::text"),
        catalog,
        reference(principals_setting, await vector_schema(connection), stored),
    )
