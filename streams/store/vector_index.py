"""Which vector index a store has, and how to search it."""

from dataclasses import dataclass
from typing import Final

from streams.store.catalog import INDEX_DEFINITION, USABLE_INDEX, Connection, qualified_names
from streams.store.reference import index_definitions, normalized_index, reference

__all__ = ["EF_SEARCH", "VectorIndex", "read_vector_index"]

#: hnsw.ef_search, the size of the candidate list in rows; docs/performance.md shows how it was chosen.
EF_SEARCH: Final = 400


@dataclass(frozen=True, slots=True)
class VectorIndex:
    """The index that nearest-neighbour searches use.

    Attributes:
        by_halfvec: whether it is on the normalized vectors in half precision; otherwise on the full vectors.
    """

    by_halfvec: bool


async def read_vector_index(connection: Connection) -> VectorIndex:
    """The usable index, preferably in half precision; without any, as for an old one."""
    async with qualified_names(connection):
        rows = await connection.fetch(_INDEXES)
    return VectorIndex(
        any(normalized_index(row["definition"]) == _by_halfvec(row["dimensions"]) for row in rows)
    )


def _by_halfvec(dimensions: int) -> str:
    """The definition of the index in half precision; it does not depend on the setting's name."""
    statements = reference("anabranch.principals", dimensions=dimensions)
    by_halfvec, _ = index_definitions(next(found for found in statements if "hnsw" in found.definition))
    return by_halfvec


# The type modifier is the number of dimensions.
_INDEXES: Final = f"""
    SELECT {INDEX_DEFINITION} AS definition, a.atttypmod AS dimensions
    FROM pg_index i
    JOIN pg_class c ON c.oid = i.indexrelid
    JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attname = 'embedding'
    WHERE i.indrelid = to_regclass('public.document_chunks') AND i.indisvalid AND {USABLE_INDEX}
"""  # noqa: S608  # constant names
