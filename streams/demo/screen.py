"""The demo's output on a terminal."""

import shlex
from collections.abc import Mapping
from typing import Any

from rich.padding import Padding
from rich.table import Table

from streams.core.messages import DIMENSIONS
from streams.demo.conversation import WRONG_DIMENSIONS, Answer, DeadLetter
from streams.demo.stack import Stack, client_environment
from streams.demo.summary import ANSWERED_WELL, expected_rank
from streams.result_view import facts, passages_table
from streams.sample import Corpus
from streams.settings import EmbeddingSettings, secret_names
from streams.terminal import Console, Text

__all__ = ["Screen"]

_PASSAGES_SHOWN = 3
# Of different users, by keys of the golden set: in a topic, with a filter, and one question by two users.
_ANSWERS_SHOWN = frozenset(
    {
        *("tranquil-or-shooting", "routing-exercise", "late-delivery-sum"),
        *("logger-drift-public", "logger-drift-own-notes"),
    }
)


class Screen:
    """Shows results as they arrive.

    Args:
        console: where to.
        corpus: what the questions are about.
        show_all: show all answers, not only a few.
    """

    def __init__(self, console: Console, corpus: Corpus, *, show_all: bool) -> None:
        self._console = console
        self._show_all = show_all
        self._omitted = 0
        self._topics = {topic.id: topic.title for topic in corpus.topics}
        self._sessions = {session.id: session.title for session in corpus.sessions}

    def show_introduction(self, corpus: Corpus) -> None:
        searchable = sum(chunk.embedding_row is not None for chunk in corpus.chunks)
        self._console.print(
            Text.assemble(
                (f"{len(corpus.queries)} questions", "bold"),
                f" about {len(corpus.documents)} documents ({searchable} embedded chunks), each from a user who may"
                " read only some of them.",
            )
        )
        self._console.print(
            "Each question is sent to Kafka as an Avro event, and each answer comes back the same way.\n"
        )

    def show(self, outcome: Answer | DeadLetter) -> None:
        if isinstance(outcome, Answer):
            if self._show_all or outcome.question.key in _ANSWERS_SHOWN:
                self._show_answer(outcome)
            else:
                self._omitted += 1
        else:
            self._console.print(Text.assemble(("✗ dead letter ", "bold red"), (outcome.code, "red")))
            self._console.print(Padding(Text(outcome.reason, style="dim"), (0, 0, 1, 2)))

    def _show_answer(self, answer: Answer) -> None:
        question, result = answer.question, answer.result
        rank = expected_rank(answer)
        mark = ("✓ ", "bold green") if rank is not None and rank <= ANSWERED_WELL else ("✗ ", "bold red")
        self._console.print(Text.assemble(mark, (question.text, "bold")))
        where = "all readable documents"
        if question.topic_id is not None:
            where = f"topic “{self._topics[question.topic_id]}” and its session"
        elif question.session_id is not None:
            where = f"session “{self._sessions[question.session_id]}”"
        self._console.print(
            facts(result, principals=question.principals, where=where, duration=f"{answer.latency_ms:.0f} ms")
        )
        expected = [chunk_id for chunk_id, grade in question.expected.items() if grade > 0]
        self._console.print(passages_table(result.results[:_PASSAGES_SHOWN], expected=expected))
        if result.k_returned > _PASSAGES_SHOWN:
            self._console.print(Text(f"      … {result.k_returned - _PASSAGES_SHOWN} more", style="dim"))
        self._console.print()

    def show_omitted(self) -> None:
        """Say how many answers were not shown."""
        if self._omitted:
            self._console.print(f"… {self._omitted} more answers; anabranch demo --all shows them\n")

    def show_summary(self, summary: Mapping[str, Any], seconds: float) -> None:
        golden, latency = summary["golden"], summary["latency_ms"]
        table = Table(title="Summary", title_justify="left", title_style="bold", show_header=False, box=None)
        table.add_column(style="dim")
        table.add_column()
        table.add_row("events", str(summary["events"]))
        table.add_row("results", f"{summary['results']} with {summary['passages']} passages")
        for code, number in summary["dead_letters"].items():
            table.add_row(
                "dead letters",
                Text.assemble(
                    f"{number} × ",
                    (code, "red"),
                    f" (intentional: {WRONG_DIMENSIONS} components instead of {DIMENSIONS})",
                ),
            )
        table.add_row(
            "latency",
            f"p50 {latency['p50']} ms · p95 {latency['p95']} ms · p99 {latency['p99']} ms, Kafka to Kafka",
        )
        hits = round(golden["hit_at_5"] * golden["queries"])
        table.add_row(
            "answers",
            Text.assemble(
                f"expected passage in the top {ANSWERED_WELL}: ",
                (f"{hits} of {golden['queries']}", "green"),
                f" · nDCG@10 {golden['ndcg_at_10']:.3f}",
            ),
        )
        table.add_row("total time", f"{seconds:.1f} s")
        self._console.print(table)

    def show_next_step(self) -> None:
        self._console.print(
            "\nNext: anabranch demo --keep leaves everything running, and prints lines to paste into another terminal;"
            " the last one asks a question",
            soft_wrap=True,
        )

    def show_addresses(self, stack: Stack, example: Answer, embedding: Mapping[str, str]) -> None:
        """Print where everything is, and lines to paste into another terminal; the last one asks as in the example.

        Args:
            stack: the components.
            example: an answer with passages.
            embedding: the settings for embedding texts, if there are any.
        """
        settings = stack.settings
        rows = {
            "topics": f"{settings.anabranch_input_topic} → {settings.anabranch_output_topic}"
            f" ({settings.anabranch_dead_letter_topic})",
            "metrics": f"{stack.web}/metrics",
            "health": f"{stack.web}/healthz/ready",
            "worker log": str(stack.worker_log),
        }
        secrets = sorted(embedding.keys() & secret_names(EmbeddingSettings))
        also = f" (besides {', '.join(secrets)}, which must be set there)" if secrets else ""
        exports = client_environment(stack) | {
            name: value for name, value in embedding.items() if name not in secrets
        }
        lines = [
            Text(""),
            Text("Everything is still running; press Ctrl-C to stop", "bold"),
            *(Text.assemble((f" {name:<12}", "dim"), value) for name, value in rows.items()),
            Text(""),
            Text(f"Paste into another terminal{also}", "bold"),
            *(Text(f"export {name}={shlex.quote(value)}") for name, value in exports.items()),
            Text("anabranch tail --dead-letters --from-beginning --limit 1"),
            Text(_ask(example, in_words=bool(embedding))),
        ]
        for line in lines:
            self._console.print(line, soft_wrap=True)  # a wrapped line could not be pasted


def _ask(example: Answer, *, in_words: bool) -> str:
    """The command that asks as in an example: its question, or what is similar to its first passage."""
    principals = [part for name in example.question.principals for part in ("--principal", name)]
    what = (
        [example.question.text] if in_words else ["--like", str(example.result.results[0].matched_chunk_id)]
    )
    return shlex.join(["anabranch", "ask", *principals, *what])
