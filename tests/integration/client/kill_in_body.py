"""An extractor that hangs in the body of one result, where it is killed.

Arguments: bootstrap servers, output topic, group, a file for the ids of the events whose bodies began, and the event in
whose body it hangs.
"""

import asyncio
import sys
from pathlib import Path

from streams.client import Client

ROOT = Path(__file__).resolve().parents[3]


def note(log: Path, event_id: str) -> None:
    with log.open("a") as file:
        file.write(f"{event_id}\n")


async def main(bootstrap_servers: str, topic: str, group: str, log: str, last: str) -> None:
    async with Client(bootstrap_servers, output_topic=topic) as client:
        async for result in client.results(group=group):
            note(Path(log), str(result.event_id))
            if str(result.event_id) == last:
                await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
