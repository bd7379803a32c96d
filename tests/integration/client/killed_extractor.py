"""The example's extractor, killed at one result: before its transaction ends, or right after.

Arguments: the extractor's connection string, its group, the event in question, and "before" or "after".
"""

import asyncio
import os
import signal
import sys
from typing import Any

from examples import extractor


def killed_after(act: Any, event_id: str) -> Any:
    async def act_and_die(connection: Any, result: Any) -> None:
        await act(connection, result)
        if str(result.event_id) == event_id:
            os.kill(os.getpid(), signal.SIGKILL)

    return act_and_die


if __name__ == "__main__":
    dsn, extractor.GROUP, event_id, when = sys.argv[1:]
    name = {"before": "act", "after": "act_once"}[when]
    setattr(extractor, name, killed_after(getattr(extractor, name), event_id))
    asyncio.run(extractor.main(dsn))
