"""One worker under load for half an hour, a fault each minute: what it holds must not grow. `make soak` runs it."""
