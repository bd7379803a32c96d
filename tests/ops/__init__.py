"""Alerts on real faults: a real Prometheus with compressed rules, real workers, Apache Kafka and PostgreSQL."""
