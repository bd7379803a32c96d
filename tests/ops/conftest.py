"""Servers, the check for Prometheus, and figures to print at the end of the run."""

import pytest

from tests.faults.conftest import servers
from tests.integration.conftest import figures
from tests.left_out import unavailable
from tests.ops.prometheus import Unavailable, program

__all__ = ["figures", "prometheus", "servers"]


@pytest.fixture(scope="session")
def prometheus() -> None:
    """Leaves the test out where Prometheus is not installed."""
    try:
        program()
    except Unavailable as reason:
        unavailable(str(reason), enable="install Prometheus (Debian's package `prometheus`)")
