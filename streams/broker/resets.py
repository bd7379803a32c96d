"""A connection that has just been reset, as aiokafka expects to be told of it.

uvloop raises RuntimeError when something is written to a transport that is closed; asyncio raises nothing, and aiokafka
expects OSError (https://github.com/aio-libs/aiokafka/issues/1038). Unforeseen there, it ends the producer's sender, or
its updates of metadata, for good: nothing would be published until the process is started again.
"""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from aiokafka.conn import AIOKafkaConnection, CloseReason
from aiokafka.errors import KafkaConnectionError

__all__ = ["patch_connection_resets"]


@cache
def patch_connection_resets() -> None:
    """From now on, every connection of aiokafka in this process says of itself that it is broken."""
    for name in ("send", "_send_sasl_token"):
        setattr(AIOKafkaConnection, name, _expecting(getattr(AIOKafkaConnection, name)))


def _expecting(send: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(send)
    def expecting(connection: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return send(connection, *args, **kwargs)
        except RuntimeError as error:
            connection.close(reason=CloseReason.CONNECTION_BROKEN)
            raise KafkaConnectionError(
                f"Connection at {connection.host}:{connection.port} broken: {error}"
            ) from error

    return expecting
