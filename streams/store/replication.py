"""Replication lag: on a replica, a revoked row stays readable until the revocation arrives."""

import math
from typing import Final

import asyncpg

from streams.core.errors import StoreUnavailable

__all__ = ["LAG_SECONDS", "LagLimit", "ReplicaConnection", "lag_seconds"]

#: How old the data may be, in seconds, as an expression in SQL: 0 on a primary; on a replica the age of its newest
#: proof, infinite without one. On a replica it is never 0, even if its clock is behind the primary's: a limit of 0
#: allows no replica. There are two kinds of proof:
#: - The last commit that it has replayed, from any database of the server. On an idle primary, it is old.
#: - The last message from the primary, if everything up to the primary's position in that message is replayed. Only
#:   members of pg_read_all_stats see it. On an idle connection, there is one every wal_receiver_timeout / 2. Its
#:   position is what the primary has sent (WalSndKeepalive in walsender.c), so an unsent backlog goes unnoticed.
#: Whether the replica is connected proves nothing: it may wait for a primary that does not answer.
LAG_SECONDS: Final = """
CASE WHEN pg_catalog.pg_is_in_recovery() THEN
  -- GREATEST ignores NULL.
  GREATEST(
    1e-6,
    COALESCE(
      EXTRACT(epoch FROM pg_catalog.clock_timestamp() - GREATEST(
        (SELECT r.last_msg_send_time FROM pg_catalog.pg_stat_wal_receiver r
         WHERE r.status = 'streaming' AND r.latest_end_lsn <= pg_catalog.pg_last_wal_replay_lsn()),
        pg_catalog.pg_last_xact_replay_timestamp()))::float8,
      'Infinity'))
ELSE 0 END
"""

# A connection to a replica is asked again after this time; the metric shows the largest lag of this many seconds.
_ASK_EVERY_SECONDS = 1.0
_SHOWN_SECONDS = 5.0


class ReplicaConnection(asyncpg.Connection):
    """A connection that remembers when its server's lag was measured.

    Attributes:
        lag_measured_at: event loop time.
    """

    lag_measured_at: float = -math.inf

    @property
    def is_primary(self) -> bool:
        """Whether the server reported that it is a primary. PostgreSQL 13 and some poolers report nothing."""
        return getattr(self.get_settings(), "in_hot_standby", None) == "off"

    def lag_was_measured(self, now: float) -> None:
        self.lag_measured_at = now

    def lag_is_known(self, now: float) -> bool:
        """Whether a search may run without measuring the lag first."""
        return self.is_primary or now - self.lag_measured_at < _ASK_EVERY_SECONDS


class LagLimit:
    """Refuses replicas that lag too much, and keeps what the metric shows.

    Args:
        max_seconds: the largest lag of a replica that may be searched.
    """

    def __init__(self, max_seconds: float) -> None:
        self._max_seconds = max_seconds
        self._shown = math.nan
        self._shown_since = -math.inf

    @property
    def seconds(self) -> float:
        """The largest lag of the last seconds; 0: a primary, infinite: unknown, NaN: not measured yet."""
        return self._shown

    def check(self, seconds: float, now: float) -> None:
        """Take a measurement.

        Raises:
            StoreUnavailable: the replica lags too much, or may do so.
        """
        if not seconds <= self._shown or now - self._shown_since > _SHOWN_SECONDS:
            self._shown, self._shown_since = seconds, now
        if seconds <= self._max_seconds:
            return
        behind = "an unknown time" if math.isinf(seconds) else f"{seconds:.0f} s"
        raise StoreUnavailable(
            f"the replica may be {behind} behind its primary, and revoked rows may still be readable;"
            f" ANABRANCH_MAX_REPLICATION_LAG_SECONDS is {self._max_seconds:g}"
        )


async def lag_seconds(connection: asyncpg.Connection) -> float:
    """How old the data of this server may be: 0 on a primary; infinite if a replica cannot tell."""
    return float(await connection.fetchval(f"SELECT {LAG_SECONDS}"))
