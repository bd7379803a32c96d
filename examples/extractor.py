"""A downstream extractor: acts exactly once on each result, although results may be delivered more than once.

The id of a result is stored in the transaction that stores the action's effect; only then is the result committed to
Kafka. The action here stores each year that a passage mentions; replace `act` by your own.

Run it with the connection string of its database; other settings are the commands': ``python extractor.py postgresql://…``
"""

import asyncio
import re
import sys

import asyncpg

from streams.client import Client, RetrievalResult

TABLES = """
    CREATE TABLE IF NOT EXISTS answers_seen (result_id uuid PRIMARY KEY, seen_at timestamptz NOT NULL DEFAULT now());
    CREATE TABLE IF NOT EXISTS years (result_id uuid NOT NULL, chunk_id uuid NOT NULL, year int NOT NULL);
"""
GROUP = "year-extractor"
YEAR = re.compile(r"\b(?:1[5-9]|20)\d\d\b")


async def act_once(connection: asyncpg.Connection, result: RetrievalResult) -> None:
    async with connection.transaction():
        is_new = await connection.fetchval(
            "INSERT INTO answers_seen (result_id) VALUES ($1) ON CONFLICT DO NOTHING RETURNING true",
            result.result_id,
        )
        if is_new:
            await act(connection, result)


async def act(connection: asyncpg.Connection, result: RetrievalResult) -> None:
    years = [
        (result.result_id, passage.chunk_id, int(year))
        for passage in result.results
        for year in YEAR.findall(passage.text_content)
    ]
    await connection.executemany("INSERT INTO years (result_id, chunk_id, year) VALUES ($1, $2, $3)", years)


async def main(dsn: str) -> None:
    connection = await asyncpg.connect(dsn)
    await connection.execute(TABLES)
    async with Client.from_environment() as client:
        async for result in client.results(group=GROUP):
            await act_once(connection, result)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
