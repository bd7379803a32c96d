"""FastStream with aiokafka and asyncpg, and the plain statements.

FastStream processes messages of one subscriber concurrently with ``max_workers``, which needs its default way to
acknowledge: offsets are committed before messages are answered. So a crash loses events here; the pipeline may not.
"""

import json
from typing import Any

import asyncpg
import uvloop
from faststream import FastStream
from faststream.kafka import KafkaBroker, KafkaMessage

from benchmarks.peers.common import decode, encode, options, parse
from benchmarks.peers.plain import PlainStore, connect, search, server_settings


async def _keep(connection: asyncpg.Connection) -> None:
    """Nothing to reset on a connection that returns to the pool: the principals are local to a transaction."""
    del connection


async def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--our-store", default="", help="JSON of a PlainStore, to search other tables")
    arguments = parser.parse_args()
    store = PlainStore() if not arguments.our_store else PlainStore(**json.loads(arguments.our_store))
    schema = parse(arguments.schema)
    pool = await asyncpg.create_pool(
        arguments.dsn,
        min_size=arguments.concurrency,
        max_size=arguments.concurrency,
        init=connect,
        reset=_keep,
        server_settings=server_settings(arguments.ef_search, "force_custom_plan"),
    )
    broker = KafkaBroker(arguments.bootstrap_servers, logger=None)

    async def decoder(message: KafkaMessage) -> Any:
        return decode(schema, message.body)

    @broker.subscriber(  # type: ignore[untyped-decorator]  # FastStream is not in this environment
        arguments.input_topic,
        group_id=arguments.input_topic,
        auto_offset_reset="earliest",
        max_workers=arguments.concurrency,
        fetch_max_wait_ms=arguments.fetch_max_wait_ms,
        session_timeout_ms=6000,
        rebalance_timeout_ms=2000,
        decoder=decoder,
    )
    async def answer(event: dict[str, Any], message: KafkaMessage) -> None:
        async with pool.acquire() as connection:
            rows = await search(connection, store, event)
        passages = [{**row, "score": 1 - row["distance"]} for row in map(dict, rows)]
        await broker.publish(
            encode(event["event_id"], passages), arguments.output_topic, key=message.raw_message.key
        )

    try:
        await FastStream(broker).run()
    finally:
        await pool.close()


if __name__ == "__main__":
    uvloop.run(main())
