"""Which vector index a store has, and how to search it."""

from dataclasses import dataclass
from typing import Final

from streams.store.catalog import INDEX_DEFINITION, USABLE_INDEX, Connection, qualified_names
from streams.store.reference import index_definitions, normalized_index, reference

__all__ = ["VectorIndex", "read_vector_index"]

# hnsw.ef_search, the size of the candidate list: for everything that the principals may read, and for a scope that a
# session, a topic or filters narrow. docs/performance.md shows how they were chosen.
_EF_SEARCH: Final = (400, 300)
# The same for an index that was built with fewer candidates, as in an earlier release.
_EF_SEARCH_OLD_BUILD: Final = (400, 400)
_EF_CONSTRUCTION: Final = 400


@dataclass(frozen=True, slots=True)
class VectorIndex:
    """The index that nearest-neighbour searches use.

    Attributes:
        by_halfvec: whether it is on the normalized vectors in half precision; otherwise on the full vectors.
        ef_search: the size of its candidate list, in rows, for everything that the principals may read.
        narrowed_ef_search: the same for a scope that a session, a topic or filters narrow.
    """

    by_halfvec: bool
    ef_search: int
    narrowed_ef_search: int


async def read_vector_index(connection: Connection) -> VectorIndex:
    """The usable index built with most candidates, preferably in half precision; without any, as for an old one."""
    by_halfvec, by_vector = index_definitions(_REFERENCE)
    async with qualified_names(connection):
        rows = await connection.fetch(_INDEXES)
    found = [
        (row["ef_construction"], definition == by_halfvec)
        for row in rows
        if (definition := normalized_index(row["definition"])) in (by_halfvec, by_vector)
    ]
    candidates, halfvec = max(found, default=(0, False))
    return VectorIndex(halfvec, *(_EF_SEARCH if candidates >= _EF_CONSTRUCTION else _EF_SEARCH_OLD_BUILD))


_REFERENCE: Final = next(
    statement for statement in reference("anabranch.principals") if "hnsw" in statement.definition
)

# 64 is pgvector's default.
_INDEXES: Final = f"""
    SELECT {INDEX_DEFINITION} AS definition,
           coalesce((SELECT option_value::int FROM pg_options_to_table(c.reloptions)
                     WHERE option_name = 'ef_construction'), 64) AS ef_construction
    FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
    WHERE i.indrelid = to_regclass('public.document_chunks') AND i.indisvalid AND {USABLE_INDEX}
"""  # noqa: S608  # constant names
