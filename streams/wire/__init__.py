"""The two contracts on the wire: Avro derived from JSON Schema, and the codec between bytes and messages."""

from streams.wire.codec import BadWriterSchema, Codec, query_to_json, result_to_json

__all__ = ["BadWriterSchema", "Codec", "query_to_json", "result_to_json"]
