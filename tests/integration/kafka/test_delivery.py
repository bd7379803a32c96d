"""What is proved on the embedded broker, proved on Apache Kafka: results and dead letters.

The tests are those next door; ``broker`` is another one here.
"""
# ruff: noqa: F401  # pytest collects them

from tests.integration.worker.test_bad_input import test_each_kind_becomes_one_dead_letter
from tests.integration.worker.test_end_to_end import (
    test_every_field_of_an_event_is_carried,
    test_results_equal_exact_search,
)
