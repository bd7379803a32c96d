"""A model in a folder of this machine, exported to ONNX."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from streams.core.embedding_errors import ProviderMisconfigured, ProviderUnavailable
from streams.embedding.provider import Embedded, Vectors, load_package

__all__ = ["LocalProvider", "OnnxModel", "Pooling"]

Pooling = Literal["mean", "cls"]

_POOLED: Final = ("sentence_embedding", "embedding")
_PADDING: Final = ("<pad>", "[PAD]")
_VECTOR_PER_TOKEN: Final = 3


class OnnxModel:
    """A sentence model on onnxruntime.

    Args:
        folder: contains one ``*.onnx`` and its ``tokenizer.json``.
        max_tokens: of a text, counted by the model's tokenizer; the rest is cut off.
        pooling: how an export that returns one vector per token becomes an embedding: their mean, or the first one. An
            export with an output ``sentence_embedding`` or ``embedding``, or with one vector per text, includes it.

    Raises:
        ProviderMisconfigured: onnxruntime or tokenizers is not installed, or the folder has no usable model.
    """

    def __init__(self, folder: Path, *, max_tokens: int, pooling: Pooling = "mean") -> None:
        onnxruntime: Any = load_package("onnxruntime", extra="local")
        tokenizers: Any = load_package("tokenizers", extra="local")
        models, tokenizer = sorted(folder.glob("*.onnx")), folder / "tokenizer.json"
        if len(models) != 1 or not tokenizer.is_file():
            raise ProviderMisconfigured(f"{folder} must contain exactly one *.onnx file and a tokenizer.json")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer))
            self._session = onnxruntime.InferenceSession(str(models[0]), providers=["CPUExecutionProvider"])
        except Exception as error:  # noqa: BLE001  # both libraries raise plain Exception, too
            raise ProviderMisconfigured(
                f"the model in {folder} cannot be loaded ({type(error).__name__})"
            ) from None
        self._tokenizer.enable_truncation(max_tokens)
        self._pad()
        self._inputs = {item.name for item in self._session.get_inputs()}
        outputs = [item.name for item in self._session.get_outputs()]
        self._output = next((name for name in _POOLED if name in outputs), outputs[0])
        self._pooling = pooling
        try:
            self.encode(["a " * max_tokens])  # a letter is at least one token
        except ProviderUnavailable:
            raise ProviderMisconfigured(f"the model does not run, or not with {max_tokens} tokens") from None

    def _pad(self) -> None:
        """Pad to the longest text of a batch, with the tokenizer's own padding token."""
        own = self._tokenizer.padding or {}
        token = own.get("pad_token") or next(
            (token for token in _PADDING if self._tokenizer.token_to_id(token) is not None), None
        )
        if token is None:
            raise ProviderMisconfigured("the tokenizer has no padding token")
        self._tokenizer.enable_padding(pad_id=self._tokenizer.token_to_id(token), pad_token=token)

    def encode(self, texts: Sequence[str]) -> Embedded:
        """Embeddings of unit length of at least one text.

        Raises:
            ProviderUnavailable: the model fails, for example for lack of memory.
        """
        encoded = self._tokenizer.encode_batch(list(texts))
        mask = np.array([item.attention_mask for item in encoded], dtype=np.int64)
        inputs = {
            "input_ids": np.array([item.ids for item in encoded], dtype=np.int64),
            "attention_mask": mask,
            "token_type_ids": np.array([item.type_ids for item in encoded], dtype=np.int64),
        }
        try:
            [output] = self._session.run(
                [self._output], {name: values for name, values in inputs.items() if name in self._inputs}
            )
        except Exception as error:  # noqa: BLE001  # onnxruntime raises classes of its own, derived from Exception
            raise ProviderUnavailable(f"the model fails ({type(error).__name__})") from None
        vectors = np.asarray(output, dtype=np.float32)
        if vectors.ndim == _VECTOR_PER_TOKEN:
            vectors = vectors[:, 0] if self._pooling == "cls" else _mean(vectors, mask)
        lengths: Vectors = np.linalg.norm(vectors, axis=1, keepdims=True).astype(np.float32)
        lengths[lengths == 0] = 1
        unit: Vectors = vectors / lengths
        return Embedded(unit, [bool(item.overflowing) for item in encoded])


def _mean(vectors: Vectors, mask: np.ndarray[Any, Any]) -> Vectors:
    weights = mask[:, :, None].astype(np.float32)
    mean: Vectors = (vectors * weights).sum(axis=1) / weights.sum(axis=1)
    return mean


class LocalProvider:
    """Runs the model in a thread, one batch at a time: a batch already uses all processors."""

    def __init__(self, model: OnnxModel) -> None:
        self._model = model
        self._turn = asyncio.Lock()

    async def embed(self, texts: Sequence[str], *, dimensions: int | None = None) -> Embedded:
        del dimensions  # an export has one number of dimensions
        async with self._turn:
            return await asyncio.to_thread(self._model.encode, texts)

    async def close(self) -> None:
        pass
