"""The demo's output on a terminal."""

import shlex
from collections.abc import Mapping
from typing import Any

from rich.padding import Padding
from rich.table import Table

from streams.core.messages import DIMENSIONS, Passage
from streams.demo.conversation import WRONG_DIMENSIONS, Answer, DeadLetter
from streams.demo.stack import Stack
from streams.demo.summary import ANSWERED_WELL, expected_rank
from streams.sample import Corpus
from streams.terminal import Console, Text

__all__ = ["Screen"]

_PASSAGES_SHOWN = 3


class Screen:
    """Shows results as they arrive."""

    def __init__(self, console: Console, corpus: Corpus) -> None:
        self._console = console
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
            self._show_answer(outcome)
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
        passages = f"{result.k_returned} passage{'' if result.k_returned == 1 else 's'}"
        facts = [
            ", ".join(question.principals),
            result.profile,
            where,
            f"{passages}, {result.tokens_used} tokens, {answer.latency_ms:.0f} ms",
        ]
        self._console.print(Text("  " + " · ".join(facts), style="dim"))
        table = Table(box=None, show_header=False, padding=(0, 1), pad_edge=False, expand=True)
        table.add_column("rank", justify="right", style="dim", width=4)
        table.add_column("scope", width=6)
        table.add_column("score", justify="right", width=5)
        table.add_column("passage", ratio=3, no_wrap=True, overflow="ellipsis")
        table.add_column("source", ratio=2, no_wrap=True, overflow="ellipsis", style="cyan")
        table.add_column("tokens", justify="right", style="dim", width=9)
        for passage in result.results[:_PASSAGES_SHOWN]:
            table.add_row(*_row(passage, answers=answer.question.expected.get(passage.chunk_id, 0) > 0))
        self._console.print(table)
        self._console.print()

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

    def addresses(self, stack: Stack) -> None:
        settings = stack.settings
        rows = {
            "topics": f"{settings.anabranch_input_topic} → {settings.anabranch_output_topic}"
            f" ({settings.anabranch_dead_letter_topic})",
            "metrics": f"{stack.web}/metrics",
            "health": f"{stack.web}/healthz/ready",
            "worker log": str(stack.worker_log),
        }
        connections = {
            "KAFKA_BOOTSTRAP_SERVERS": stack.bootstrap_servers,
            "DATABASE_CONNECTION_STRING": stack.worker_dsn,
            "DATABASE_ADMIN_CONNECTION_STRING": stack.admin_dsn,
        }
        lines = [
            Text(""),
            Text("Everything is still running", "bold"),
            *(Text.assemble((f" {name:<12}", "dim"), value) for name, value in rows.items()),
            Text(""),
            Text("Paste into another terminal", "bold"),
            *(Text(f"export {name}={shlex.quote(value)}") for name, value in connections.items()),
            Text("anabranch tail --dead-letters --from-beginning"),
            Text(""),
            Text("Press Ctrl-C to stop."),
        ]
        for line in lines:
            self._console.print(line, soft_wrap=True)  # a wrapped line could not be pasted


def _row(passage: Passage, *, answers: bool) -> list[Text]:
    text = " ".join(passage.text_content.split())
    source = passage.title or str(passage.document_id)
    if passage.page is not None:
        source += f", p. {passage.page}"
    return [
        Text(str(passage.rank)),
        Text(passage.scope, style="magenta" if passage.scope == "local" else "blue"),
        Text(f"{passage.score:.3f}"),
        Text(text, style="green" if answers else ""),
        Text(source),
        Text(f"{passage.token_count} tok"),
    ]
