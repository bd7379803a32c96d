"""Asks the sample's questions in a deployment: ``python -m streams.demo.questions``, with a worker's Kafka settings.

It writes the sample corpus first, so ``DATABASE_CONNECTION_STRING`` must be of a member of anabranch_writer. Exit code
1 if a question was not answered.
"""

import asyncio
import logging
import sys
from collections.abc import Sequence

import asyncpg
from aiokafka.errors import KafkaError

from streams import sample
from streams.broker.topics import MissingTopics
from streams.configured import broker_connection, open_codec
from streams.core.documents import DocumentError
from streams.demo.conversation import Answer
from streams.demo.corpus import load_corpus
from streams.demo.screen import Screen
from streams.demo.summary import ANSWERED_WELL, expected_rank
from streams.evaluation.golden import read_golden
from streams.evaluation.live import LivePipeline
from streams.evaluation.query_runner import Answered, DeadLettered
from streams.evaluation.sample import sample_lines
from streams.evaluation.scoring import percentiles
from streams.settings import Settings, SettingsError, load
from streams.store.connect_errors import explain
from streams.store.ingestion import IngestionError
from streams.terminal import Console, Text, echo

__all__ = ["ask_questions", "main"]

_ANSWER_SECONDS = 20.0


class NotAnswered(Exception):
    """A question was not answered; the message says why in one line."""


def main() -> None:
    """Load the corpus, ask, and print; reports an error in one line."""
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # aiokafka also logs the errors that it raises
    try:
        settings = load()
        asyncio.run(ask_questions(settings))
    except SettingsError as error:
        echo(f"sample: {error}", err=True)
        sys.exit(2)
    except (NotAnswered, MissingTopics, KafkaError, IngestionError, DocumentError) as error:
        echo(f"sample: {error}", err=True)
        sys.exit(1)
    except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        echo(f"sample: {explain(error) or f'PostgreSQL: {type(error).__name__}: {error}'}", err=True)
        sys.exit(1)


async def ask_questions(settings: Settings) -> None:
    """Write the corpus, publish its questions one after another, and print each answer and a summary.

    Raises:
        NotAnswered: a question was dead-lettered, or not answered within 20 s.
        SettingsError: the connection string is missing, or a Kafka setting is unusable.
        MissingTopics: at least one topic does not exist.
        KafkaError: the broker is unreachable or rejects the request.
        IngestionError, DocumentError: the store is not ready, or rejects a document.
        OSError, asyncpg.PostgresError, asyncpg.InterfaceError: the store cannot be reached or written.
    """
    corpus = sample.load()
    await load_corpus(settings.store_dsn, corpus)
    console = Console()
    screen = Screen(console, corpus, show_all=True)
    screen.show_introduction(corpus)
    answers: list[Answer] = []
    async with LivePipeline(
        broker_connection(settings).client_options(),
        codec=open_codec(settings),
        input_topic=settings.anabranch_input_topic,
        output_topic=settings.anabranch_output_topic,
        dead_letter_topic=settings.anabranch_dead_letter_topic,
        timeout_seconds=_ANSWER_SECONDS,
    ) as pipeline:
        for question, query in zip(
            corpus.queries, read_golden(sample_lines(corpus), principals=()), strict=True
        ):
            outcome = await pipeline.ask(query.fresh_event())
            if not isinstance(outcome, Answered):
                why = (
                    f"dead letter {outcome.code}: {outcome.reason}"
                    if isinstance(outcome, DeadLettered)
                    else outcome.reason
                )
                raise NotAnswered(f"{question.key}: {why}")
            answers.append(Answer(question, outcome.result, outcome.latency_ms))
            screen.show(answers[-1])
    console.print(_summary(answers))


def _summary(answers: Sequence[Answer]) -> Text:
    ranks = [expected_rank(answer) for answer in answers]
    hits = sum(rank is not None and rank <= ANSWERED_WELL for rank in ranks)
    latency = percentiles([answer.latency_ms for answer in answers])
    return Text(
        f"{len(answers)} questions answered, {hits} with the expected passage in the top {ANSWERED_WELL};"
        f" latency p50 {latency.p50:.1f} ms, p99 {latency.p99:.1f} ms, Kafka to Kafka"
    )


if __name__ == "__main__":
    main()
