"""`anabranch migrate`."""

import click

from streams.cli.command import command
from streams.cli.errors import Failed, NeedsConsent
from streams.terminal import echo

__all__ = ["migrate"]


@command("anabranch migrate --dry-run > review.sql", "anabranch migrate")
@click.option("--dry-run", is_flag=True, help="Print the SQL without running it.")
@click.option(
    "--yes",
    is_flag=True,
    help="Continue even if roles lose access to rows, or another role owns the tables.",
)
@click.option(
    "--prune", is_flag=True, help="Also remove what only older workers need. Upgrade all workers first."
)
def migrate(*, dry_run: bool, yes: bool, prune: bool) -> None:
    """Migrate the store to the reference schema, as its owner. Idempotent.

    Without --yes, changes nothing and exits with 3 if roles would lose access to rows or another role owns the tables.
    """
    import streams.store.migrate as store
    from streams.cli.connections import run_on_store
    from streams.settings import load

    settings = load()
    setting = settings.anabranch_principals_setting
    dimensions = settings.anabranch_embedding_dimensions
    try:
        if dry_run:
            lines = run_on_store(
                store.plan(settings.admin_dsn, principals_setting=setting, dimensions=dimensions, prune=prune)
            )
            for line in lines:
                echo(line)
        else:
            lines = run_on_store(
                store.migrate(
                    settings.admin_dsn,
                    principals_setting=setting,
                    dimensions=dimensions,
                    consent=yes,
                    prune=prune,
                    report=echo,
                )
            )
    except store.ConsentRequired as error:
        raise NeedsConsent(str(error)) from None
    except store.MigrationError as error:
        raise Failed(str(error)) from None
    if not lines:
        echo(f"{'-- ' if dry_run else ''}nothing to do: the store matches the reference schema")
