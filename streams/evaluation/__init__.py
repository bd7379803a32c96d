"""Golden queries: runs them, judges and measures the results, and reports on them."""
