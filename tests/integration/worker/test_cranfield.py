"""Retrieval quality from Kafka to Kafka, on a real collection with real judgements.

Exact search in numpy over the same embeddings is the yardstick: recall@15 of chunks against it, and nDCG@10 of
documents (a document counts as its best chunk; gain = grade) as a share of its own.

Once, on the embedded broker: what is found does not depend on what carried the question.
"""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from uuid import NAMESPACE_URL, UUID, uuid5

import numpy as np
import pytest

from tests.conftest import Database
from tests.integration.corpora import Chunk, Corpus, Document, load
from tests.integration.harness import Channel, OutputReader, Worker, as_avro, query, read_result
from tests.left_out import unavailable

pytestmark = pytest.mark.parametrize("broker", ["embedded"], indirect=True)

DATA = Path(__file__).resolve().parents[4] / "shared" / "data" / "cranfield"
REFERENCE_NDCG = 0.5216  # the collection's own note, for exact search


def require_data() -> None:
    if not DATA.is_dir():
        unavailable(
            "the Cranfield collection is not beside the checkout",
            enable="put it into ../shared/data/cranfield",
        )


def normalized(name: str) -> np.ndarray:
    vectors: np.ndarray = np.load(DATA / name).astype(np.float32)
    return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))


def ndcg_at_10(ranked: Sequence[str], grades: dict[str, int]) -> float:
    gains = [grades.get(document, 0) for document in ranked[:10]]
    best = sorted(grades.values(), reverse=True)[:10]

    def discounted(values: Sequence[int]) -> float:
        return sum(value / math.log2(place + 2) for place, value in enumerate(values))

    return discounted(gains) / discounted(best) if best else 0.0


def distinct(documents: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(documents))


async def test_it_finds_what_exact_search_finds(
    database: Database,
    channel: Channel,
    output_reader: OutputReader,
    start_worker: Callable[..., Worker],
    figures: Callable[[str], None],
) -> None:
    require_data()
    rows = [json.loads(line) for line in (DATA / "chunks.jsonl").read_text(encoding="utf-8").splitlines()]
    vectors, asked = normalized("chunk_embeddings.npy"), normalized("query_embeddings.npy")
    queries = [json.loads(line)["id"] for line in (DATA / "queries.jsonl").read_text().splitlines()]
    grades: dict[str, dict[str, int]] = defaultdict(dict)
    for line in (DATA / "qrels.tsv").read_text().splitlines()[1:]:
        query_id, document, grade, _ = line.split("\t")
        grades[query_id][document] = int(grade)

    def document_id(row: dict[str, str]) -> UUID:
        return uuid5(NAMESPACE_URL, f"document:{row['doc_id']}")

    corpus = Corpus.of(
        [Document(document_id(row), frozenset({"public"}), title=row["title"]) for row in rows],
        [
            Chunk(
                uuid5(NAMESPACE_URL, f"chunk:{row['id']}"),
                document_id(row),
                row["text"] or row["title"],
                vectors[i],
                chunk_position=i,
            )
            for i, row in enumerate(rows)
        ],
    )
    numbers = {chunk.id: number for number, chunk in enumerate(corpus.chunks.values())}
    await load(database.writer, corpus)

    worker = start_worker(database.worker)
    await worker.until_ready()
    # `docs` takes a k of 20, enough for ten documents where some share chunks; without its threshold.
    events = [query(vector, profile="docs", k=20, similarity_threshold=0) for vector in asked]
    await channel.send_all(
        [(as_avro(event), query_id.encode()) for event, query_id in zip(events, queries, strict=True)]
    )
    await output_reader.until(results=len(events))

    exact = np.argsort(-(asked @ vectors.T), axis=1, kind="stable")
    recall, ours, theirs = [], [], []
    place = {query_id: number for number, query_id in enumerate(queries)}
    for record in output_reader.results:
        assert record.key is not None
        query_id = record.key.decode()
        nearest = exact[place[query_id]]
        found = [numbers[UUID(str(passage["chunk_id"]))] for passage in read_result(record.value)["results"]]
        recall.append(len(set(found[:15]) & set(nearest[:15])) / 15)
        ours.append(ndcg_at_10(distinct([rows[i]["doc_id"] for i in found]), grades[query_id]))
        theirs.append(ndcg_at_10(distinct([rows[i]["doc_id"] for i in nearest[:60]]), grades[query_id]))
    found_recall, found_ndcg, exact_ndcg = (float(np.mean(values)) for values in (recall, ours, theirs))
    samples = await worker.scrape()
    milliseconds = 1000 * samples.total("anabranch_event_duration_seconds_sum") / len(events)
    figures(
        f"{len(events)} queries, {len(rows)} chunks: recall@15 {found_recall:.4f} of exact search's,"
        f" nDCG@10 {found_ndcg:.4f} (exact {exact_ndcg:.4f}, ratio {found_ndcg / exact_ndcg:.4f}),"
        f" {milliseconds:.0f} ms an event under load"
    )
    assert len(recall) == 225
    assert exact_ndcg == pytest.approx(REFERENCE_NDCG, abs=0.0005)
    assert found_recall >= 0.98
    assert found_ndcg >= 0.99 * exact_ndcg
