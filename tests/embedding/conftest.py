"""The imitated servers, and the loaded model."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from streams.embedding.local import OnnxModel
from tests.embedding.imitation import Imitation, imitation


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Imitation]:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    async with imitation() as started:
        yield started


@pytest.fixture(scope="session")
def model(model_folder: Path) -> OnnxModel:
    return OnnxModel(model_folder, max_tokens=256)
