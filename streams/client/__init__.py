"""A client for asyncio: asks questions and waits for their results, publishes events, and reads results.

::

    async with Client("localhost:9092") as client:
        result = await client.retrieve(text="Can a ripple travel upstream?", principals=["group:staff"])
        for passage in result.results:
            print(passage.prompt_text)
"""

from streams.broker.connection import BrokerConnection
from streams.client.client import Client
from streams.client.errors import (
    ClientClosed,
    ClientError,
    ConnectionFailed,
    InvalidEvent,
    PublishTimeout,
    RetrievalFailed,
    RetrievalTimeout,
    UnreadableResult,
)
from streams.client.events import Embedding, QueryOptions
from streams.core.messages import ConversationMessage, Filters, MetadataRange, Passage, RetrievalResult

__all__ = [
    "BrokerConnection",
    "Client",
    "ClientClosed",
    "ClientError",
    "ConnectionFailed",
    "ConversationMessage",
    "Embedding",
    "Filters",
    "InvalidEvent",
    "MetadataRange",
    "Passage",
    "PublishTimeout",
    "QueryOptions",
    "RetrievalFailed",
    "RetrievalResult",
    "RetrievalTimeout",
    "UnreadableResult",
]
