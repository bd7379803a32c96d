"""JSON over HTTP, for providers without an SDK of their own."""

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from pydantic import SecretStr

from streams.core.embedding_errors import ProviderUnavailable
from streams.embedding.calls import failure
from streams.embedding.provider import header_value, load_package, usable_url

__all__ = ["JsonApi"]


class JsonApi:
    """A server that takes and returns JSON. Its connections are kept open.

    Args:
        base_url: what all paths are appended to.
        headers: sent with every request, for example the API key.

    Raises:
        ProviderMisconfigured: aiohttp is not installed, or the address or a header is unusable.
    """

    def __init__(self, base_url: str, headers: Mapping[str, SecretStr]) -> None:
        self._aiohttp: Any = load_package("aiohttp", extra="openai")
        self._base_url = usable_url(base_url)
        self._headers = {name: header_value(value) for name, value in headers.items()}
        self._session: Any = None

    async def post(self, path: str, body: Mapping[str, object]) -> Any:
        """The response to a request, parsed.

        Raises:
            EmbeddingError: there is none, or it is not a success, or not JSON.
        """
        if self._session is None:  # a session belongs to the event loop it is created in
            self._session = self._aiohttp.ClientSession(
                headers=self._headers,
                timeout=self._aiohttp.ClientTimeout(total=None),  # the calls have a timeout
                proxy=self._proxy(),
            )
        try:
            # Following a redirect would send key and text to a server that nobody configured.
            async with self._session.post(
                f"{self._base_url}{path}", json=body, allow_redirects=False
            ) as response:
                if response.status != HTTPStatus.OK:
                    raise failure(response.status, response.headers.get("Retry-After"))
                content = await response.read()
        except (self._aiohttp.ClientError, OSError) as error:
            # Without its text, which may contain the address, and in it a password.
            raise ProviderUnavailable(f"no response from the provider ({type(error).__name__})") from None
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            raise ProviderUnavailable("the provider's response is not JSON", status=HTTPStatus.OK) from None

    def _proxy(self) -> str | None:
        """The proxy in the environment, such as HTTPS_PROXY; None: none.

        With `trust_env`, aiohttp would also send the passwords in ~/.netrc, or fail because there is a key, too.
        """
        parts = urlsplit(self._base_url)
        return None if proxy_bypass(parts.netloc) else getproxies().get(parts.scheme)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None
