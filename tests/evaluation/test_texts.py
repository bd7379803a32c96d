"""The golden questions as texts: composed, embedded with the real model, and answered from the store.

Once directly, once through both stages.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final
from uuid import UUID

import numpy as np
import pytest
from aiokafka import AIOKafkaProducer

from streams import sample
from streams.core.composition import Question
from streams.core.messages import DIMENSIONS, QueryEmbedding, QueryText, RetrievalResult
from streams.core.profiles import BUILTIN_PROFILES
from streams.embedding.embedder import Embedder
from streams.embedding.summarizers import Composer
from streams.evaluation.direct import DirectStore
from streams.evaluation.golden import GoldenQuery, read_golden
from streams.evaluation.query_runner import Answered, run_queries
from streams.evaluation.sample import sample_lines
from streams.evaluation.scoring import judge, measure
from streams.providers import make_composer, make_embedder
from streams.settings import load_embedding
from streams.store.postgres import PostgresStore
from streams.tokens import count_tokens
from streams.wire import Codec
from tests.conftest import SETTING, Database
from tests.integration.embedder.stages import Texts, open_texts
from tests.integration.harness import Channel, OutputReader, Worker

CORPUS: Final = sample.load()
TITLES: Final = {topic.id: topic.title for topic in CORPUS.topics}


async def ndcg(store: Database, queries: Sequence[GoldenQuery]) -> float:
    direct = DirectStore(
        PostgresStore(store.worker, connections=2, search_timeout_seconds=10, exact_scan_rows=20_000),
        principals_setting=SETTING,
        dimensions=DIMENSIONS,
        profiles=BUILTIN_PROFILES,
        default_profile="extraction",
        embedding_model=CORPUS.embedding_model,
        count_tokens=count_tokens,
    )
    async with direct:
        outcomes = await run_queries(queries, direct, in_flight=1)
    judgements = []
    for query, outcome in zip(queries, outcomes, strict=True):
        assert isinstance(outcome, Answered)
        judgements.append(judge(query.expected, outcome.result.results))
    return float(np.mean([scores.ndcg for scores in measure(judgements)]))


async def as_texts(
    queries: Sequence[GoldenQuery], embedder: Embedder, composer: Composer, titles: Mapping[UUID, str]
) -> list[GoldenQuery]:
    """The queries with vectors made from their texts."""

    async def embed(query: GoldenQuery) -> GoldenQuery:
        topic = query.event.topic_id
        title = None if topic is None else titles.get(topic)
        composed = await composer.compose(Question(query.text or "", topic_id=topic, topic_title=title))
        assert not composed.warnings
        made = await embedder.embed(composed.text)
        assert not made.truncated
        event = query.event.model_copy(update={"embedding": made.vector.tolist()})
        return GoldenQuery(query.key, query.text, event, query.expected)

    return await asyncio.gather(*map(embed, queries))


@pytest.mark.slow
async def test_questions_as_texts_are_answered_as_well_as_with_the_shipped_vectors(
    store: Database, model_folder: Path, record_property: Callable[[str, object], None]
) -> None:
    settings = load_embedding(
        {
            "ANABRANCH_EMBEDDING_PROVIDER": "local",
            "ANABRANCH_EMBEDDING_PATH": str(model_folder),
            "ANABRANCH_EMBEDDING_MODEL": CORPUS.embedding_model,
        }
    )
    composer = make_composer(settings)
    queries = read_golden(sample_lines(CORPUS))
    async with make_embedder(settings) as embedder:
        texts = await as_texts(queries, embedder, composer, {})
        # Their topics' titles change only some.
        with_topic = [query for query in queries if query.event.topic_id is not None]
        titled = {query.key: query for query in await as_texts(with_topic, embedder, composer, TITLES)}
    stored = await ndcg(store, queries)
    alone = await ndcg(store, texts)
    with_titles = await ndcg(store, [titled.get(query.key, query) for query in texts])
    record_property(
        "figure",
        f"nDCG@10 of the golden questions: shipped vectors {stored:.4f}, as texts {alone:.4f},"
        f" with topic titles {with_titles:.4f}",
    )
    assert stored == pytest.approx(0.921, abs=0.002)
    assert abs(alone - stored) <= 0.005
    assert with_titles == pytest.approx(0.910, abs=0.005)  # as docs/embedding.md has it


async def ask(channel: Channel, queries: Sequence[GoldenQuery]) -> list[RetrievalResult]:
    """Publish the questions in words, and wait for their results."""
    shared = QueryText.model_fields.keys() & QueryEmbedding.model_fields.keys()
    async with (
        AIOKafkaProducer(bootstrap_servers=channel.bootstrap_servers) as producer,
        open_texts(replace(channel, producer=producer)) as texts,
        OutputReader(channel) as reader,
    ):
        for query in queries:
            event = query.event.model_dump(mode="json", include=set(shared), exclude_none=True)
            await texts.send(event | {"schema_version": "1.0.0", "text": query.text})
        await texts.until_answered(reader, seconds=120)
        assert texts.dead_letters == []
        codec = Codec()
        found = [codec.decode_result(record.value) for record in reader.results]
    results = {result.event_id: result for result in found}
    return [results[query.event.event_id] for query in queries]


@pytest.mark.slow
def test_questions_are_answered_as_well_through_both_stages(
    store: Database,
    channel: Channel,
    start_worker: Callable[[str, Channel], Worker],
    start_embedder: Callable[[Channel, Mapping[str, str]], Worker],
    record_property: Callable[[str, object], None],
) -> None:
    queries = read_golden(sample_lines(CORPUS))
    stored = asyncio.run(ndcg(store, queries))
    start_worker(store.worker, channel)
    embedder = start_embedder(channel, Texts(channel).settings)
    results = asyncio.run(ask(channel, queries))
    assert embedder.is_ready()
    judgements = [
        judge(query.expected, result.results) for query, result in zip(queries, results, strict=True)
    ]
    texts = float(np.mean([scores.ndcg for scores in measure(judgements)]))
    record_property(
        "figure", f"nDCG@10 of the golden questions through both stages {texts:.4f}, directly {stored:.4f}"
    )
    assert all(result.embedding_model == CORPUS.embedding_model for result in results)
    assert abs(texts - stored) <= 0.005
