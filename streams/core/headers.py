"""A record's headers, and which of an event's headers its result carries."""

from collections.abc import Sequence
from typing import Final

__all__ = ["Headers", "result_headers"]

Headers = Sequence[tuple[str, bytes | None]]
"""Name and value of each header, in order; names may repeat."""

# In lower case; names are compared without case. They describe the event's value (its schema, type and encoding, as
# Confluent, Apicurio, Spring, HTTP and CloudEvents do), or where its producer expects a reply: a consumer that follows
# them would decode a result as an event, or reply to it.
_OF_THE_VALUE: Final = frozenset(
    {
        *("__value_schema_id", "content-type", "contenttype", "content-encoding"),
        *("__typeid__", "__contenttypeid__"),
        *("kafka_replytopic", "kafka_replypartition"),
    }
)
_OF_THE_VALUE_BY_PREFIX: Final = ("ce_", "apicurio.value.")


def result_headers(headers: Headers) -> Headers:
    """The headers of an event that its result carries: all that do not describe the event's value or its reply."""
    return [
        (name, value)
        for name, value in headers
        if (lower := name.lower()) not in _OF_THE_VALUE and not lower.startswith(_OF_THE_VALUE_BY_PREFIX)
    ]
