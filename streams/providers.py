"""Creates the embedder, and the composer of what it embeds, from the settings."""

from functools import partial

from streams.embedding.calls import Calls
from streams.embedding.cohere import COHERE_URL, CohereProvider, InputType
from streams.embedding.embedder import Embedder
from streams.embedding.local import LocalProvider, OnnxModel
from streams.embedding.openai import OPENAI_URL, OpenAIProvider
from streams.embedding.provider import Provider
from streams.embedding.summarizers import (
    GEMINI_URL,
    Composer,
    GeminiSummarizer,
    OpenAISummarizer,
    Summarizer,
)
from streams.settings import EmbeddingSettings
from streams.tokens import count_tokens, first_tokens

__all__ = ["make_composer", "make_embedder"]

# What the sample's embeddings were computed with; a model with position embeddings takes no more than 512.
_LOCAL_MAX_TOKENS = 256


def make_embedder(settings: EmbeddingSettings, *, input_type: InputType = "search_query") -> Embedder:
    """The embedder from the settings; entering it checks the provider.

    Args:
        settings: the settings.
        input_type: whether it embeds questions or what is searched; matters for some providers.

    Raises:
        ProviderMisconfigured: the provider's package is not installed, or the local model is unusable.
    """
    max_tokens = settings.anabranch_embedding_max_tokens
    is_local = settings.anabranch_embedding_provider == "local"
    return Embedder(
        _provider(settings, input_type),
        dimensions=settings.anabranch_embedding_dimensions,
        # A local model counts by its own tokenizer.
        shorten=str if is_local or max_tokens is None else partial(first_tokens, limit=max_tokens),
        batch_size=settings.anabranch_embedding_batch_size,
        batch_wait_seconds=settings.anabranch_embedding_batch_wait_seconds,
    )


def _provider(settings: EmbeddingSettings, input_type: InputType) -> Provider:
    model, url = settings.anabranch_embedding_model or "", settings.anabranch_embedding_base_url
    key = settings.anabranch_embedding_api_key
    calls = Calls(
        timeout_seconds=settings.anabranch_embedding_timeout_seconds,
        calls_per_minute=settings.anabranch_embedding_calls_per_minute,
    )
    if settings.anabranch_embedding_provider == "cohere" and key is not None:
        return CohereProvider(
            base_url=url or COHERE_URL, model=model, api_key=key, calls=calls, input_type=input_type
        )
    if settings.anabranch_embedding_provider == "local" and settings.anabranch_embedding_path is not None:
        return LocalProvider(
            OnnxModel(
                settings.anabranch_embedding_path,
                max_tokens=settings.anabranch_embedding_max_tokens or _LOCAL_MAX_TOKENS,
                pooling=settings.anabranch_embedding_pooling,
            )
        )
    return OpenAIProvider(base_url=url or OPENAI_URL, model=model, api_key=key, calls=calls)


def make_composer(settings: EmbeddingSettings) -> Composer:
    """What composes the texts to embed, from the settings.

    Raises:
        ProviderMisconfigured: the summarizer's package is not installed, or its address is not a URL.
    """
    return Composer(
        _summarizer(settings),
        timeout_seconds=settings.anabranch_embedding_summarizer_timeout_seconds,
        count_tokens=count_tokens,
        first_tokens=first_tokens,
    )


def _summarizer(settings: EmbeddingSettings) -> Summarizer | None:
    model = settings.anabranch_embedding_summarizer_model or ""
    url = settings.anabranch_embedding_summarizer_base_url
    key = settings.anabranch_embedding_summarizer_api_key
    if settings.anabranch_embedding_summarizer == "gemini" and key is not None:
        return GeminiSummarizer(base_url=url or GEMINI_URL, model=model, api_key=key)
    if settings.anabranch_embedding_summarizer == "openai":
        return OpenAISummarizer(base_url=url or OPENAI_URL, model=model, api_key=key)
    return None
