"""One factor for all intervals of the rules, and for those of the workers that may be shorter."""

from typing import Final

from k8s.observability.rules import Parameters

__all__ = ["FACTOR", "PARAMETERS", "SCRAPE_SECONDS", "WORKER_SETTINGS", "minutes", "seconds"]

# An hour takes ten minutes. It is a compromise: what cannot be compressed (see docs/ops.md) seems six times as long.
FACTOR: Final = 6.0
PARAMETERS: Final = Parameters(compress=FACTOR)
# 15 s in the deployment files.
SCRAPE_SECONDS: Final = 15 / FACTOR

# The defaults, compressed. Kafka does not accept a session timeout below 6 s: it is compressed less. The timeout of a
# search is not: a busy machine reaches a shorter one without any fault.
WORKER_SETTINGS: Final = {
    "ANABRANCH_RETRY_BASE_SECONDS": f"{1 / FACTOR:.2f}",
    "ANABRANCH_RETRY_MAX_SECONDS": f"{10 / FACTOR:.2f}",
    "ANABRANCH_REBALANCE_TIMEOUT_SECONDS": f"{40 / FACTOR:.2f}",
    "ANABRANCH_GRACE_PERIOD_SECONDS": f"{25 / FACTOR:.2f}",
    "ANABRANCH_MAX_POLL_INTERVAL_SECONDS": f"{1000 / FACTOR:.0f}",
    "ANABRANCH_SESSION_TIMEOUT_SECONDS": "6",
}


def seconds(uncompressed_minutes: float) -> float:
    """How many seconds so many minutes take in a run."""
    return 60 * uncompressed_minutes / FACTOR


def minutes(real_seconds: float) -> float:
    """How many uncompressed minutes so many seconds of a run stand for."""
    return real_seconds * FACTOR / 60
