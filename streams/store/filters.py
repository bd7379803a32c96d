"""A search's filters in the form that the store's functions take.

Belongs here: what each filter means in terms of values, elements and closed ranges. Does not belong here: how they are
looked up, which is in ``schemas/postgres/005_search.sql``.
"""

import json
import math
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Final

from streams.core.messages import Filters, MetadataRange

__all__ = ["conditions"]

# What instants differ by at least, in Python and in PostgreSQL.
_MICROSECOND: Final = timedelta(microseconds=1)
_EARLIEST, _LATEST = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)


def conditions(filters: Filters | None) -> tuple[str | None, str | None, str | None, str | None]:
    """Section, document type, URL prefix, and the conditions on metadata as JSON: see `anabranch_conditions`."""
    if filters is None:
        return (None, None, None, None)
    of_metadata = list(_of_metadata(filters))
    return (
        filters.section,
        filters.document_type,
        filters.source_url_prefix,
        json.dumps(of_metadata) if of_metadata else None,
    )


def _of_metadata(filters: Filters) -> Iterator[dict[str, object]]:
    """The kinds that usually keep the fewest rows come first, because the planner can start with one of the first."""
    for key, value in (filters.metadata or {}).items():
        yield {"key": key, "values": [value]}
    for key, elements in (filters.metadata_contains or {}).items():
        for element in elements:
            yield {"key": key, "element": element}
    for key, values in (filters.metadata_any or {}).items():
        yield {"key": key, "values": values}
    for key, bounds in (filters.metadata_range or {}).items():
        # No value is both a number and an instant, so no chunk meets both conditions.
        if (numbers := _numbers(bounds)) != [None, None]:
            yield {"key": key, "numbers": numbers}
        if (instants := _instants(bounds)) != [None, None]:
            yield {"key": key, "instants": instants}


def _numbers(bounds: MetadataRange) -> list[float | str | None]:
    """The smallest and largest number within the bounds; None: no bound."""
    low = [] if bounds.gte is None else [bounds.gte]
    high = [] if bounds.lte is None else [bounds.lte]
    if bounds.gt is not None:
        low.append(math.nextafter(bounds.gt, math.inf))
    if bounds.lt is not None:
        high.append(math.nextafter(bounds.lt, -math.inf))
    # JSON has no infinity; as a string, PostgreSQL accepts it.
    return [
        bound if bound is None or math.isfinite(bound) else str(bound)
        for bound in (max(low, default=None), min(high, default=None))
    ]


def _instants(bounds: MetadataRange) -> list[str | None]:
    """The first and last instant within the bounds; None: no bound."""
    first, last = bounds.at_or_after, bounds.at_or_before
    if bounds.after is not None:
        if bounds.after > _LATEST - _MICROSECOND:
            return ["infinity", None]
        first = max(first or _EARLIEST, bounds.after + _MICROSECOND)
    if bounds.before is not None:
        if bounds.before < _EARLIEST + _MICROSECOND:
            return [None, "-infinity"]
        last = min(last or _LATEST, bounds.before - _MICROSECOND)
    return [None if bound is None else bound.isoformat() for bound in (first, last)]
