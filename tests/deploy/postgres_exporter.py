"""The metrics of postgres_exporter that the dashboards use, with their labels.

As exposed by 0.17.1 and 0.20.1 with the collectors ``stat_checkpointer`` and ``postmaster``, which are off by default.
0.11 needs extra queries (``--extend.query-path``) for tables and checkpoints.
"""

from typing import Final

__all__ = ["METRICS"]

_DATABASE: Final = frozenset({"datid", "datname"})
_TABLE: Final = frozenset({"datname", "schemaname", "relname"})

METRICS: Final[dict[str, frozenset[str]]] = {
    "pg_up": frozenset(),
    "pg_postmaster_start_time_seconds": frozenset(),
    "pg_settings_max_connections": frozenset(),
    "pg_stat_activity_count": frozenset({"datname", "state"}),
    "pg_stat_activity_max_tx_duration": frozenset({"datname", "state"}),
    "pg_locks_count": frozenset({"datname", "mode"}),
    "pg_database_size_bytes": frozenset({"datname"}),
    **{
        f"pg_stat_database_{name}": _DATABASE
        for name in (
            "numbackends",
            "xact_commit",
            "xact_rollback",
            "blks_hit",
            "blks_read",
            "tup_fetched",
            "tup_inserted",
            "tup_updated",
            "tup_deleted",
            "deadlocks",
            "temp_bytes",
        )
    },
    **{
        f"pg_stat_user_tables_{name}": _TABLE for name in ("idx_scan", "seq_scan", "n_live_tup", "n_dead_tup")
    },
    "pg_stat_checkpointer_num_timed_total": frozenset(),
    "pg_stat_checkpointer_num_requested_total": frozenset(),
}
