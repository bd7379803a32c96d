"""The worker process: Faust's lifecycle around one event's way, and the composition root."""
