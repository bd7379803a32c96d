"""One command that shows what Anabranch does, on real parts, and leaves nothing behind."""

import asyncio
import json
import signal
import sys
from time import perf_counter

from rich.console import Console
from rich.status import Status

from streams import sample
from streams.demo.conversation import Answer, DeadLetter, converse
from streams.demo.screen import Screen
from streams.demo.stack import started
from streams.demo.summary import summarize

__all__ = ["run_demo"]


async def run_demo(*, keep: bool, as_json: bool) -> bool:
    """Run the demo.

    Args:
        keep: leave everything running until interrupted, and say where it is.
        as_json: one machine-readable summary on standard output, everything else on standard error.

    Returns:
        Whether every golden question has its expected passage among the first five.

    Raises:
        DemoError: it cannot go on.
        asyncio.CancelledError: it was interrupted; whatever was started has been stopped.
    """
    task = asyncio.current_task()
    if task is not None:  # SIGINT cancels the main task by itself
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    began = perf_counter()
    console = Console(stderr=as_json, highlight=False)
    progress = _Progress(console)
    corpus = sample.load()
    screen = Screen(console, corpus)
    outcomes: list[Answer | DeadLetter] = []
    try:
        async with started(corpus, progress.say) as stack:
            progress.done()
            if not as_json:
                screen.introduce(corpus)
            async for outcome in converse(stack, corpus):
                outcomes.append(outcome)
                if not as_json:
                    screen.show(outcome)
            summary = summarize(outcomes)
            if as_json:
                sys.stdout.write(json.dumps(summary) + "\n")
                sys.stdout.flush()
            else:
                screen.conclude(summary, perf_counter() - began)
            if keep:
                screen.addresses(stack)
                await asyncio.Event().wait()
    finally:
        progress.done()
    return bool(summary["golden"]["hit_at_5"] == 1.0)


class _Progress:
    """One line for each step, with the seconds it took; a spinner where there is a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = None
        self._step = ""
        self._since = 0.0

    def say(self, step: str) -> None:
        self.done()
        self._step, self._since = step, perf_counter()
        self._status = self._console.status(step + " …")
        self._status.start()

    def done(self) -> None:
        if self._status is None:
            return
        self._status.stop()
        self._status = None
        self._console.print(f"[green]•[/] {self._step} [dim]{perf_counter() - self._since:.1f} s[/]")
