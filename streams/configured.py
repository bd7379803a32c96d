"""Creates parts of a worker, and of the commands around it, from the settings."""

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from pydantic import SecretStr

from streams.broker.connection import BrokerConnection, UnusableCertificate
from streams.broker.topics import TopicSpec, topic_specs
from streams.core.messages import CONTRACT_VERSIONS, oldest_result_version
from streams.core.profiles import BUILTIN_PROFILES, Profile, ProfileError, overlay
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
from streams.settings import EmbeddingSettings, Settings, SettingsError
from streams.tokens import count_tokens, first_tokens
from streams.wire import BadWriterSchema, Codec

__all__ = [
    "broker_connection",
    "load_profiles",
    "make_composer",
    "make_embedder",
    "open_codec",
    "required_topics",
    "result_contract",
]


def broker_connection(settings: Settings) -> BrokerConnection:
    """The Kafka connection from the settings.

    Raises:
        SettingsError: a certificate or key cannot be used; one line.
    """

    def secret(value: SecretStr | None) -> str | None:
        return None if value is None else value.get_secret_value()

    connection = BrokerConnection(
        bootstrap_servers=settings.kafka_bootstrap_servers,
        security_protocol=settings.kafka_security_protocol,
        sasl_mechanism=settings.kafka_sasl_mechanism,
        username=settings.kafka_sasl_username,
        password=secret(settings.kafka_sasl_password),
        cafile=settings.kafka_ssl_cafile,
        certfile=settings.kafka_ssl_certfile,
        keyfile=settings.kafka_ssl_keyfile,
        key_password=secret(settings.kafka_ssl_key_password),
    )
    try:
        connection.client_options()
    except UnusableCertificate as error:
        raise SettingsError(str(error)) from None
    return connection


def load_profiles(settings: Settings) -> Mapping[str, Profile]:
    """The built-in profiles, overridden by the operator's file.

    Raises:
        SettingsError: the file cannot be read, is not valid TOML, or has a malformed profile; one line.
    """
    profiles: Mapping[str, Profile] = BUILTIN_PROFILES
    if settings.anabranch_profiles_file is not None:
        try:
            tables = tomllib.loads(settings.anabranch_profiles_file.read_text(encoding="utf-8"))
            profiles = overlay(BUILTIN_PROFILES, tables)
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, ProfileError) as error:
            raise SettingsError(f"ANABRANCH_PROFILES_FILE: {error}") from None
    if settings.anabranch_default_profile not in profiles:
        raise SettingsError(
            f"ANABRANCH_DEFAULT_PROFILE: there is no profile with this name; available: {', '.join(profiles)}"
        )
    return profiles


def open_codec(settings: Settings) -> Codec:
    """The codec, for the store's dimensions, with the writer schemas of `ANABRANCH_SCHEMA_PATH`.

    Raises:
        SettingsError: a schema there is unusable.
    """
    try:
        return Codec(settings.anabranch_schema_path, dimensions=settings.anabranch_embedding_dimensions)
    except (BadWriterSchema, OSError) as error:
        raise SettingsError(f"ANABRANCH_SCHEMA_PATH: {error}") from None


def required_topics(
    settings: Settings,
    stage: Settings | None,
    *,
    partitions: int,
    replication_factor: int,
    max_event_bytes: int,
) -> list[TopicSpec]:
    """The topics of a worker, with those for replies, and of an embedding stage if its settings are given."""
    specs: dict[str, TopicSpec] = {}
    for each in (settings, *([] if stage is None else [stage])):
        for spec in topic_specs(
            input_topic=each.anabranch_input_topic,
            output_topic=each.anabranch_output_topic,
            dead_letter_topic=each.anabranch_dead_letter_topic,
            partitions=partitions,
            replication_factor=replication_factor,
            max_event_bytes=max_event_bytes,
            reply_topics=each.anabranch_reply_topics,
        ):
            specs.setdefault(spec.name, replace(spec, texts=each is stage))
    return list(specs.values())


def result_contract(settings: Settings) -> str:
    """The minor version of the results' contract.

    Raises:
        SettingsError: that version cannot express results for the store's dimensions.
    """
    dimensions = settings.anabranch_embedding_dimensions
    contract, needed = settings.anabranch_result_contract, oldest_result_version(dimensions)
    if CONTRACT_VERSIONS.index(contract) < CONTRACT_VERSIONS.index(needed):
        raise SettingsError(
            f"ANABRANCH_RESULT_CONTRACT={contract} cannot express results for {dimensions} dimensions: upgrade all"
            f" consumers of the results, then set it to {needed}"
        )
    return contract


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
