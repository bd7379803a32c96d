"""`anabranch contract`: the contracts and the Avro schemas derived from them."""

import sys
from pathlib import Path

import click

from streams.cli.command import Group
from streams.cli.errors import Failed, Unusable
from streams.terminal import echo

__all__ = ["contract"]


@click.group(
    cls=Group, examples=("anabranch contract show query_embedding@1.0.0", "anabranch contract export schemas")
)
def contract() -> None:
    """Show or export the contracts and their Avro schemas; derive and check them."""


@contract.command(
    examples=(
        "anabranch contract show query_embedding",
        "anabranch contract show retrieval_result@1.0.0 | jq .avro_schema",
    ),
    reads_settings=False,
)
@click.argument("reference", metavar="NAME[@VERSION]")
def show(reference: str) -> None:
    """Print a contract as JSON: JSON Schema, Avro schema and fingerprints. Without a version, the newest.

    The fingerprints are those of the Avro schema: crc_64_avro as in single-object encoding (in its byte order), and
    sha_256.
    """
    from streams.cli import contracts as view
    from streams.wire.contracts import UnknownContract

    try:
        echo(view.show(reference))
    except UnknownContract as error:
        raise Unusable(str(error)) from None


@contract.command(examples=("anabranch contract export schemas",), reads_settings=False)
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
def export(folder: Path) -> None:
    """Write the JSON Schema and the Avro schema of every version of every contract into a folder.

    fingerprints.json lists them. Files of the same names are overwritten.
    """
    from streams.cli import contracts as view

    try:
        for path in view.export(folder):
            echo(f"wrote {path}")
    except OSError as error:
        raise Failed(f"cannot write into {folder}: {error.strerror}") from None


@contract.command(examples=("anabranch contract derive --check",), reads_settings=False)
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 if a schema is stale.")
def derive(*, check: bool) -> None:
    """Derive schemas/avro/*.avsc from contracts/**/*.schema.json, in a checkout.

    Exit code 1 if a schema is stale (with --check), or outside a checkout.
    """
    from streams import resources
    from streams.wire.derive import stale, write

    contracts, avro = resources.contracts(), resources.schemas() / "avro"
    if check:
        names = stale(contracts, avro)
        for name in names:
            echo(f"stale: {name}")
        sys.exit(1 if names else 0)
    if not resources.in_checkout():
        raise Failed(
            "schemas are derived in a checkout, not in an installed package; run `make schemas` there"
        )
    for name in write(contracts, Path(str(avro))):
        echo(f"wrote {name}")


@contract.command(examples=("anabranch contract compatible",), reads_settings=False)
def compatible() -> None:
    """Check each contract and schema against its released versions; exit code 1 if one is not compatible.

    What a released contract accepts must still be accepted, and each schema and its released versions must be able to
    read each other's data.
    """
    from streams import resources
    from streams.cli.contracts import broken

    faults = broken(resources.contracts(), resources.schemas() / "avro")
    for fault in faults:
        echo(fault)
    if faults:
        sys.exit(1)
    echo("all contracts accept what their released versions accept")
    echo("all schemas are compatible with all released versions, in both directions")
