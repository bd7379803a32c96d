"""The clocks of the group, whatever an operator sets: a member that is told to let go has let go in time.

Apache Kafka gives up on a member that has not joined anew when the rebalance timeout ends. A member hears of a
rebalance at its next heartbeat, and then drains and commits. With a timeout of 2 s, a heartbeat every 1.5 s and a drain
of 1.2 s two workers threw each other out for ever.
"""

import itertools

import pytest

from streams.configured import broker_connection
from streams.settings import load
from streams.worker.stage_app import _DRAIN_SHARE_OF_REBALANCE, _REVOCATION_SHARE_OF_REBALANCE, _faust_app


@pytest.mark.parametrize(("session", "rebalance"), list(itertools.product([1, 6, 10, 120], [2, 10, 40, 600])))
def test_a_member_hears_of_a_rebalance_and_drains_before_it_is_given_up_on(
    session: float, rebalance: float
) -> None:
    settings = load(
        {
            "ANABRANCH_SESSION_TIMEOUT_SECONDS": str(session),
            "ANABRANCH_REBALANCE_TIMEOUT_SECONDS": str(rebalance),
            "ANABRANCH_GRACE_PERIOD_SECONDS": "3600",
        }
    )
    conf = _faust_app(settings, broker_connection(settings)).conf
    assert conf.broker_rebalance_timeout == rebalance
    assert _DRAIN_SHARE_OF_REBALANCE + 0.1 <= _REVOCATION_SHARE_OF_REBALANCE
    assert conf.broker_heartbeat_interval + _REVOCATION_SHARE_OF_REBALANCE * rebalance <= 0.85 * rebalance
    assert 3 * conf.broker_heartbeat_interval < conf.broker_session_timeout
