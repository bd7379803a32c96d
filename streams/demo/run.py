"""Shows what Anabranch does with real components in one command, and cleans up afterwards."""

import asyncio
import signal
from time import perf_counter

from rich.status import Status

from streams import sample
from streams.demo.conversation import Answer, DeadLetter, run_conversation
from streams.demo.screen import Screen
from streams.demo.stack import embedding_environment, start_stack
from streams.demo.summary import summarize
from streams.terminal import Console, Text, echo, json_text

__all__ = ["run_demo"]


async def run_demo(*, keep: bool, show_all: bool, as_json: bool) -> bool:
    """Run the demo.

    Args:
        keep: keep everything running until interrupted, and print the addresses.
        show_all: print all answers, not only a few.
        as_json: print only a JSON summary on standard output, everything else on standard error.

    Returns:
        Whether every golden question has its expected passage among the first five.

    Raises:
        DemoError: the demo cannot continue.
        SettingsError: a setting that the demo uses is invalid.
        asyncio.CancelledError: the demo was interrupted; everything that was started has been stopped.
    """
    task = asyncio.current_task()
    if task is not None:  # asyncio already cancels the main task on SIGINT
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    embedding = embedding_environment() if keep else {}
    began = perf_counter()
    console = Console(stderr=as_json)
    progress = _Progress(console)
    corpus = sample.load()
    screen = Screen(console, corpus, show_all=show_all)
    outcomes: list[Answer | DeadLetter] = []
    try:
        async with start_stack(corpus, progress.report) as stack:
            progress.done()
            if not as_json:
                screen.show_introduction(corpus)
            async for outcome in run_conversation(stack, corpus):
                outcomes.append(outcome)
                if not as_json:
                    screen.show(outcome)
            summary = summarize(outcomes)
            if as_json:
                echo(json_text(summary))
            else:
                screen.show_omitted()
                screen.show_summary(summary, perf_counter() - began)
            example = next(outcome for outcome in outcomes if isinstance(outcome, Answer))
            if keep:
                screen.show_addresses(stack, example, embedding)
                await asyncio.Event().wait()
        if not as_json:
            screen.show_next_step()
    finally:
        progress.done()
    return bool(summary["golden"]["hit_at_5"] == 1.0)


class _Progress:
    """Prints one line per step with its duration in seconds; shows a spinner on a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = None
        self._step = ""
        self._since = 0.0

    def report(self, step: str) -> None:
        self.done()
        self._step, self._since = step, perf_counter()
        self._status = self._console.status(Text(step + " …"))
        self._status.start()

    def done(self) -> None:
        if self._status is None:
            return
        self._status.stop()
        self._status = None
        took = f"{perf_counter() - self._since:.1f} s"
        self._console.print(Text.assemble(("•", "green"), f" {self._step} ", (took, "dim")))
