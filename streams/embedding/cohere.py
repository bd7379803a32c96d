"""Cohere's embedding models, through Cohere's SDK."""

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, Final, Literal

from pydantic import SecretStr

from streams.core.embedding_errors import ProviderUnavailable, TextRejected
from streams.embedding.calls import Calls, failure
from streams.embedding.provider import Embedded, Vectors, as_vectors, header_value, load_package, usable_url

__all__ = ["COHERE_URL", "CohereProvider", "InputType"]

COHERE_URL: Final = "https://api.cohere.com"
InputType = Literal["search_query", "search_document"]


class CohereProvider:
    """The endpoint ``/v2/embed``.

    A single text that is too long is sent again, for Cohere to truncate: only its rejection shows that it is too long.

    Args:
        base_url: Cohere's address.
        model: the model's name.
        api_key: the key.
        calls: makes the calls.
        input_type: whether the texts are questions or what is searched; the models embed them differently.

    Raises:
        ProviderMisconfigured: the package cohere is not installed.
    """

    def __init__(
        self,
        *,
        base_url: str,
        model: str,
        api_key: SecretStr,
        calls: Calls,
        input_type: InputType = "search_query",
    ) -> None:
        self._cohere: Any = load_package("cohere", extra="cohere")
        self._httpx: Any = load_package("httpx", extra="cohere")
        # Without a timeout of its own: the calls have one. It follows no redirect, which would send key and text to a
        # server that nobody configured.
        self._http = self._httpx.AsyncClient(timeout=None)
        self._client = self._cohere.AsyncClientV2(
            api_key=header_value(api_key),
            base_url=usable_url(base_url),
            httpx_client=self._http,
            max_retries=0,  # the calls retry
        )
        self._model = model
        self._calls = calls
        self._input_type = input_type

    async def embed(self, texts: Sequence[str], *, dimensions: int | None = None) -> Embedded:
        try:
            vectors = await self._calls.call(lambda: self._request(texts, dimensions, "NONE"))
        except TextRejected:
            if len(texts) > 1:
                raise
        else:
            return Embedded(vectors, [False] * len(texts))
        return Embedded(await self._calls.call(lambda: self._request(texts, dimensions, "END")), [True])

    async def _request(self, texts: Sequence[str], dimensions: int | None, truncate: str) -> Vectors:
        options = {} if dimensions is None else {"output_dimension": dimensions}
        try:
            response = await self._client.embed(
                model=self._model,
                input_type=self._input_type,
                texts=list(texts),
                embedding_types=["float"],
                truncate=truncate,
                **options,
            )
        except self._httpx.HTTPError as error:
            raise ProviderUnavailable(f"no response from the provider ({type(error).__name__})") from None
        except Exception as error:  # noqa: BLE001  # the SDK's parser raises any class, depending on the response
            # Without the error's text, which quotes the response.
            status = getattr(error, "status_code", None) or HTTPStatus.OK
            if status == HTTPStatus.OK:
                raise ProviderUnavailable(
                    f"the provider's response is unusable ({type(error).__name__})", status=status
                ) from None
            headers = {name.lower(): value for name, value in (getattr(error, "headers", None) or {}).items()}
            raise failure(status, headers.get("retry-after")) from None
        # The SDK does not check the types of what it parses.
        return as_vectors(getattr(getattr(response, "embeddings", None), "float_", None), len(texts))

    async def close(self) -> None:
        await self._http.aclose()
