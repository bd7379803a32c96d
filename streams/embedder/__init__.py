"""The embedding stage as a stream processor: reads questions in words, writes query events."""
