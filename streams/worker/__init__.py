"""The worker process: Faust's life cycle around the processing of events, and the composition root."""
