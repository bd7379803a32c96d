"""The Kafka side: how to reach it, how to publish, which topics there must be."""
