"""Models on this machine: the real one, and small ones made here that export what other models export."""

import asyncio
import shutil
import sys
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from streams import sample
from streams.core.embedding_errors import ProviderMisconfigured
from streams.embedding.embedder import Embedder
from streams.embedding.local import LocalProvider, OnnxModel

CORPUS: Final = sample.load()


# The real model


def test_questions_get_the_shipped_vectors(model: OnnxModel) -> None:
    questions = CORPUS.queries[:6]
    embedded = model.encode([question.text for question in questions])
    stored = np.array([CORPUS.query_embedding(question) for question in questions])
    assert embedded.vectors.dtype == np.float32
    assert np.linalg.norm(embedded.vectors, axis=1) == pytest.approx(1, abs=1e-5)
    assert (embedded.vectors * stored).sum(axis=1) == pytest.approx(1, abs=1e-3)


def test_a_text_has_the_same_vector_beside_longer_ones(model: OnnxModel) -> None:
    """Padding counts for nothing."""
    text = CORPUS.queries[0].text
    alone = model.encode([text]).vectors[0]
    beside = model.encode([text, CORPUS.chunks[0].text_content]).vectors[0]
    assert float(alone @ beside) == pytest.approx(1, abs=1e-4)


def test_a_text_is_cut_after_256_tokens(model: OnnxModel) -> None:
    # A word is a token, and each text has a first and a last one besides.
    whole, cut = " ".join(["river"] * 254), " ".join(["river"] * 300)
    embedded = model.encode([whole, cut, "a river"])
    assert embedded.truncated == [False, True, False]
    assert float(embedded.vectors[0] @ embedded.vectors[1]) == pytest.approx(1, abs=1e-4)


async def test_an_embedder_takes_it(model: OnnxModel) -> None:
    async with Embedder(LocalProvider(model), dimensions=768) as embedder:
        near, far, other = await asyncio.gather(
            *map(embedder.embed, ("water in a river", "a stream's flow", "a contract's termination"))
        )
    assert near.vector @ far.vector > near.vector @ other.vector + 0.1


# Other exports


def folder_of(tmp_path: Path, outputs: dict[str, np.ndarray[tuple[int, int], np.dtype[np.float32]]]) -> Path:
    """A model that looks each token up in a table, with these outputs; and a tokenizer of three words."""
    import onnx  # noqa: PLC0415  # only these tests need it
    from onnx import TensorProto, helper, numpy_helper  # noqa: PLC0415  # as above

    inputs = [
        helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "tokens"])
        for name in ("input_ids", "attention_mask", "token_type_ids")
    ]
    graph = helper.make_graph(
        [
            helper.make_node("Gather", [f"table {name}", "input_ids"], [name], name=f"look up {name}")
            for name in outputs
        ],
        "words",
        inputs,
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", "tokens", table.shape[1]])
            for name, table in outputs.items()
        ],
        [numpy_helper.from_array(table, f"table {name}") for name, table in outputs.items()],
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9),
        tmp_path / "m.onnx",
    )
    words = {"[PAD]": 0, "[UNK]": 1, "up": 2, "left": 3}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


UP, LEFT = np.array([1, 0], dtype=np.float32), np.array([0, 1], dtype=np.float32)
# By token: padding and unknown words would show.
TABLE: Final = np.array([[-9, -9], [5, 5], UP, LEFT], dtype=np.float32)


def test_the_mean_is_of_the_tokens_without_padding(tmp_path: Path) -> None:
    model = OnnxModel(folder_of(tmp_path, {"last_hidden_state": TABLE}), max_tokens=8)
    embedded = model.encode(["up up left", "left", "up up up up left left left left left"])
    mean = np.array([2, 1]) / np.sqrt(5)
    assert embedded.vectors[0] == pytest.approx(mean)
    assert embedded.vectors[1] == pytest.approx(LEFT)
    assert embedded.vectors[2] == pytest.approx(np.array([1, 1]) / np.sqrt(2))  # the ninth token is cut off
    assert embedded.truncated == [False, False, True]


def test_the_first_token_can_stand_for_the_text(tmp_path: Path) -> None:
    model = OnnxModel(folder_of(tmp_path, {"last_hidden_state": TABLE}), max_tokens=8, pooling="cls")
    assert model.encode(["up left left"]).vectors[0] == pytest.approx(UP)


def test_a_sentence_embedding_is_preferred_to_the_first_output(tmp_path: Path) -> None:
    other = TABLE[:, ::-1].copy()
    folder = folder_of(tmp_path, {"token_embeddings": TABLE, "sentence_embedding": other})
    assert OnnxModel(folder, max_tokens=8).encode(["up"]).vectors[0] == pytest.approx(LEFT)


def test_zeros_stay_zeros(tmp_path: Path) -> None:
    """The embedder rejects them; a division by zero would warn."""
    model = OnnxModel(folder_of(tmp_path, {"last_hidden_state": TABLE * 0}), max_tokens=8)
    assert not model.encode(["up"]).vectors.any()


# What is unusable


@pytest.mark.parametrize(
    "files", [(), ("a.onnx",), ("tokenizer.json",), ("a.onnx", "b.onnx", "tokenizer.json")]
)
def test_a_folder_without_one_model_and_its_tokenizer_is_refused(
    tmp_path: Path, files: tuple[str, ...]
) -> None:
    for name in files:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ProviderMisconfigured, match="must contain exactly one"):
        OnnxModel(tmp_path, max_tokens=256)


def test_broken_files_are_refused_in_one_line(tmp_path: Path, model_folder: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"not a model")
    (tmp_path / "tokenizer.json").write_bytes(b"{}")
    with pytest.raises(ProviderMisconfigured, match="cannot be loaded") as caught:
        OnnxModel(tmp_path, max_tokens=256)
    assert "\n" not in str(caught.value)
    shutil.copy(model_folder / "tokenizer.json", tmp_path)
    with pytest.raises(ProviderMisconfigured, match="cannot be loaded") as caught:
        OnnxModel(tmp_path, max_tokens=256)
    assert "\n" not in str(caught.value)


def test_more_tokens_than_the_model_takes_are_refused_at_once(model_folder: Path) -> None:
    """Otherwise the first long text would fail, and others with it."""
    with pytest.raises(ProviderMisconfigured, match="not with 1000 tokens"):
        OnnxModel(model_folder, max_tokens=1000)


@pytest.mark.parametrize("package", ["onnxruntime", "tokenizers"])
def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ProviderMisconfigured) as caught:
        OnnxModel(Path(), max_tokens=256)
    assert str(caught.value) == f"the package {package} is not installed: pip install 'anabranch[local]'"
