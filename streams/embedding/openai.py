"""Any endpoint with OpenAI's API: OpenAI itself, vLLM, Text Embeddings Inference, Ollama and others."""

from collections.abc import Sequence
from http import HTTPStatus
from typing import Final

from pydantic import SecretStr

from streams.core.embedding_errors import ProviderUnavailable, TextRejected
from streams.embedding.calls import Calls
from streams.embedding.json_api import JsonApi
from streams.embedding.provider import Embedded, Vectors, as_vectors

__all__ = ["OPENAI_URL", "OpenAIProvider"]

OPENAI_URL: Final = "https://api.openai.com/v1"
# Every model takes a text of this length.
_SHORTEST_CHARACTERS: Final = 128


class OpenAIProvider:
    """The endpoint ``/embeddings``.

    The API cannot truncate, and does not say how long a text may be. A single text that is rejected is halved until it
    is accepted.

    Args:
        base_url: usually ends with ``/v1``.
        model: the model's name.
        api_key: None: the server needs none.
        calls: makes the calls.
    """

    def __init__(self, *, base_url: str, model: str, api_key: SecretStr | None, calls: Calls) -> None:
        self._api = JsonApi(base_url, bearer(api_key))
        self._model = model
        self._calls = calls

    async def embed(self, texts: Sequence[str], *, dimensions: int | None = None) -> Embedded:
        try:
            vectors = await self._calls.call(lambda: self._request(texts, dimensions))
        except TextRejected:
            if len(texts) > 1 or len(texts[0]) <= _SHORTEST_CHARACTERS:
                raise
            half = texts[0][: len(texts[0]) // 2]
            return Embedded((await self.embed([half], dimensions=dimensions)).vectors, [True])
        return Embedded(vectors, [False] * len(texts))

    async def _request(self, texts: Sequence[str], dimensions: int | None) -> Vectors:
        body: dict[str, object] = {"model": self._model, "input": list(texts)}
        if dimensions is not None:
            body["dimensions"] = dimensions
        response = await self._api.post("/embeddings", body)
        try:
            by_index = {item["index"]: item["embedding"] for item in response["data"]}
            rows = [by_index[index] for index in range(len(texts))]
        except (KeyError, TypeError):
            raise ProviderUnavailable(
                "the provider's response is unusable: it is not a list of embeddings", status=HTTPStatus.OK
            ) from None
        return as_vectors(rows, len(texts))

    async def close(self) -> None:
        await self._api.close()


def bearer(api_key: SecretStr | None) -> dict[str, SecretStr]:
    """The header with which OpenAI's API takes a key."""
    return {} if api_key is None else {"Authorization": SecretStr(f"Bearer {api_key.get_secret_value()}")}
