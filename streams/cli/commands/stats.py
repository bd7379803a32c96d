"""`anabranch stats`."""

import sys

from streams.cli.command import command, json_option
from streams.cli.errors import Failed
from streams.terminal import echo

__all__ = ["stats"]


@command("anabranch stats", "anabranch stats --json > stats.json")
@json_option()
def stats(*, as_json: bool) -> None:
    """Print statistics of the store: chunks, embeddings, indexes, sizes, completeness, grants. Runs as its owner.

    Exit code 1 if derived data is wrong.
    """
    from streams.cli import stats as view
    from streams.cli.connections import run_on_store
    from streams.settings import load
    from streams.store.statistics import StatisticsError

    settings = load()
    try:
        found = run_on_store(view.read(settings.admin_dsn))
    except StatisticsError as error:
        raise Failed(str(error)) from None
    if as_json:
        echo(view.as_json(found))
    else:
        view.show(found)
    if found.differences:
        sys.exit(1)
