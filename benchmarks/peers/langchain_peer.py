"""langchain-postgres' `PGVectorStore` in a consumer loop over aiokafka.

It knows neither row-level security nor arrays in filters. So each chunk has its session, its only topic and the number
of its set of readers in metadata columns, and the loop filters by the sets that contain one of the caller's principals.
The options of the index are set once for each connection, which saves the statement that `HNSWQueryOptions` would send
before each search.
"""

import asyncio
import json
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import uvloop
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from langchain_core.embeddings import Embeddings
from langchain_postgres import PGEngine, PGVectorStore
from sqlalchemy.ext.asyncio import create_async_engine

from benchmarks.peers.common import decode, encode, options, parse
from benchmarks.peers.plain import CHAT_ROWS, EXTRACTION_ROWS, interleave, server_settings


class NoEmbeddings(Embeddings):
    """Refuses to embed: the store requires an embedding service, but events carry their embeddings."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        raise TypeError(f"{len(texts)} documents without embeddings")

    def embed_query(self, text: str) -> list[float]:
        raise TypeError(f"a query of {len(text)} characters instead of an embedding")


async def open_store(dsn: str, concurrency: int, ef_search: int) -> PGVectorStore:
    engine = create_async_engine(
        dsn.replace("postgresql://", "postgresql+asyncpg://"),
        pool_size=concurrency,
        max_overflow=0,
        connect_args={"server_settings": server_settings(ef_search, "force_custom_plan")},
    )
    return await PGVectorStore.create(
        engine=PGEngine.from_engine(engine),
        embedding_service=NoEmbeddings(),
        table_name="langchain",
        metadata_columns=["document_id", "session_id", "topic_id", "acl", "title", "source_url"],
        metadata_json_column=None,
    )


async def search(
    store: PGVectorStore, sets: Mapping[str, list[int]], event: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Answer one event: its passages in order."""
    acl = sorted({number for principal in event["principals"] for number in sets.get(principal, [])})
    vector = list(event["embedding"])
    readable = {"acl": {"$in": acl}}
    if event["topic_id"] is None:
        return await _arm(store, vector, EXTRACTION_ROWS, readable)
    session = {"session_id": {"$eq": str(event["session_id"])}}
    topic = {"topic_id": {"$eq": str(event["topic_id"])}}
    local = await _arm(store, vector, CHAT_ROWS, {"$and": [session, topic, readable]})
    wide = await _arm(store, vector, CHAT_ROWS, {"$and": [session, readable]})
    return interleave(local, wide)


async def _arm(store: PGVectorStore, vector: list[float], rows: int, where: Any) -> list[dict[str, Any]]:
    found = await store.asimilarity_search_with_score_by_vector(vector, k=rows, filter=where)
    return [
        {
            "id": document.id,
            "text_content": document.page_content,
            "score": 1 - distance,
            **document.metadata,
        }
        for document, distance in found
    ]


async def consume(arguments: Any, store: PGVectorStore, sets: Mapping[str, list[int]]) -> None:
    schema = parse(arguments.schema)
    consumer = AIOKafkaConsumer(
        arguments.input_topic,
        bootstrap_servers=arguments.bootstrap_servers,
        group_id=arguments.input_topic,
        auto_offset_reset="earliest",
        fetch_max_wait_ms=arguments.fetch_max_wait_ms,
        session_timeout_ms=6000,
        rebalance_timeout_ms=2000,
    )
    producer = AIOKafkaProducer(bootstrap_servers=arguments.bootstrap_servers)
    free = asyncio.Semaphore(arguments.concurrency)
    running: set[asyncio.Task[None]] = set()

    async def answer(record: Any) -> None:
        try:
            event = decode(schema, record.value)
            passages = await search(store, sets, event)
            await producer.send_and_wait(
                arguments.output_topic, encode(event["event_id"], passages), key=record.key
            )
        finally:
            free.release()

    async def loop() -> None:
        async for record in consumer:
            await free.acquire()
            task = asyncio.create_task(answer(record))
            running.add(task)
            task.add_done_callback(running.discard)

    await producer.start()
    await consumer.start()
    looping = asyncio.create_task(loop())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, looping.cancel)
    try:
        await looping
    except asyncio.CancelledError:
        await asyncio.gather(*running)
    finally:
        await consumer.stop()
        await producer.stop()


async def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--sets", type=Path, required=True, help="JSON: principal to numbers of sets")
    parser.add_argument("--recall", action="store_true", help="answer events from standard input instead")
    arguments = parser.parse_args()
    sets = json.loads(arguments.sets.read_text(encoding="utf-8"))
    store = await open_store(arguments.dsn, arguments.concurrency, arguments.ef_search)
    if arguments.recall:
        for line in sys.stdin:
            found = await search(store, sets, json.loads(line))
            sys.stdout.write(json.dumps([str(passage["id"]) for passage in found]) + "\n")
    else:
        await consume(arguments, store, sets)


if __name__ == "__main__":
    uvloop.run(main())
