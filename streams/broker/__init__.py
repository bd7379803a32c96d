"""The Kafka side: connecting, publishing, reading, and the topics that are required."""
