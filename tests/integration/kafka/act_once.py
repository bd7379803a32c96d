"""A consumer that acts once on each answer, as the contract's README says: its code is run from there.

Arguments: bootstrap servers, topic, group, connection string. It ends when it is killed.
"""

import asyncio
import re
import sys
from pathlib import Path
from typing import Any

import asyncpg
from aiokafka import AIOKafkaConsumer

from tests.integration.harness import read_result

ROOT = Path(__file__).resolve().parents[3]
README = ROOT / "contracts" / "retrieval" / "v1" / "README.md"


def block(language: str) -> str:
    """The README's code."""
    section = README.read_text(encoding="utf-8").split("## Act once on each answer")[1].split("\n## ")[0]
    [code] = re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)
    return str(code)


async def act(connection: "asyncpg.Connection[asyncpg.Record]", result: dict[str, Any]) -> None:
    await connection.execute("INSERT INTO acts (event_id) VALUES ($1)", result["event_id"])


async def main(bootstrap_servers: str, topic: str, group: str, dsn: str) -> None:
    names: dict[str, Any] = {}
    exec(block("python"), names)  # what the README tells others to run
    connection = await asyncpg.connect(dsn)
    consumer = AIOKafkaConsumer(
        topic,
        bootstrap_servers=bootstrap_servers,
        group_id=group,
        auto_offset_reset="earliest",
        enable_auto_commit=False,
        session_timeout_ms=6000,
    )
    await consumer.start()
    while True:
        for partition, records in (await consumer.getmany(timeout_ms=200, max_records=20)).items():
            for record in records:
                result = read_result(record.value)
                await connection.execute(
                    "INSERT INTO deliveries (result_id) VALUES ($1)", result["result_id"]
                )
                await names["act_once"](connection, result, act)
            await consumer.commit({partition: records[-1].offset + 1})


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
