"""The hosted providers, each against an imitation of its server, which succeeds and fails as the real one may."""

import asyncio
import sys
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from pydantic import SecretStr

from streams.core.embedding_errors import (
    EmbeddingError,
    KeyRejected,
    ProviderMisconfigured,
    ProviderUnavailable,
    TextRejected,
)
from streams.embedding.calls import Calls, failure
from streams.embedding.cohere import CohereProvider
from streams.embedding.openai import OpenAIProvider
from streams.embedding.provider import Provider
from tests.embedding.imitation import (
    DIMENSIONS,
    KEY,
    Behaviour,
    Imitation,
    content,
    cut,
    hang_up,
    redirect,
    slow,
    status,
    trickle,
    vector,
)

BASE_SECONDS: Final = 0.02
TEXT: Final = "secret text about tides"

Make = Callable[..., Provider]


def quick(**options: Any) -> Calls:
    defaults = {"timeout_seconds": 5.0, "base_seconds": BASE_SECONDS, "max_seconds": 0.1}
    return Calls(**(defaults | options))


def at(url: str, path: str) -> str:
    return f"{url}{path}" if url.startswith("http://127") else url


def cohere(server: Imitation, *, model: str = "embed-v4.0", key: str = KEY, **options: Any) -> Provider:
    return CohereProvider(
        base_url=at(server.url, "/cohere"), model=model, api_key=SecretStr(key), calls=quick(**options)
    )


def openai(server: Imitation, *, model: str = "some-model", key: str = KEY, **options: Any) -> Provider:
    return OpenAIProvider(
        base_url=at(server.url, "/openai/v1/"), model=model, api_key=SecretStr(key), calls=quick(**options)
    )


both = pytest.mark.parametrize("make", [cohere, openai])


async def error_of(provider: Provider, *texts: str) -> EmbeddingError:
    """The error, after checking that it and its traceback give nothing away."""
    with pytest.raises(EmbeddingError) as caught:
        await provider.embed(texts or [TEXT])
    await provider.close()
    shown = "".join(traceback.format_exception(caught.value))
    for secret in (KEY, KEY[:9], "secret text"):
        assert secret not in shown
    assert "\n" not in str(caught.value)
    return caught.value


# Success


@both
async def test_each_text_gets_its_own_vector_in_float32(server: Imitation, make: Make) -> None:
    provider = make(server)
    texts = [f"text {number}" for number in range(20)]
    embedded = await provider.embed(texts)
    assert embedded.vectors.dtype == np.float32
    assert embedded.vectors.shape == (20, DIMENSIONS)
    assert np.array_equal(embedded.vectors, np.array([vector(text) for text in texts], dtype=np.float32))
    assert embedded.truncated == [False] * 20
    assert len(server.received) == 1
    await provider.close()


async def test_cohere_is_asked_for_the_embedding_of_a_question(server: Imitation) -> None:
    provider = cohere(server, model="embed-english-v3.0")
    await provider.embed(["a", "b"])
    [request] = server.received
    assert request.path == "/cohere/v2/embed"
    assert {name: request.body[name] for name in ("model", "input_type", "texts", "embedding_types")} == {
        "model": "embed-english-v3.0",
        "input_type": "search_query",
        "texts": ["a", "b"],
        "embedding_types": ["float"],
    }
    assert "output_dimension" not in request.body
    await provider.embed(["a"], dimensions=None)
    await provider.close()


@pytest.mark.parametrize(
    ("make", "model", "name"),
    [(cohere, "embed-v4.0", "output_dimension"), (openai, "text-embedding-3-small", "dimensions")],
)
async def test_a_model_with_a_choice_of_dimensions_is_asked(
    server: Imitation, make: Make, model: str, name: str
) -> None:
    provider = make(server, model=model)
    assert (await provider.embed(["a"], dimensions=5)).vectors.shape == (1, 5)
    assert server.received[0].body[name] == 5
    await provider.close()


async def test_a_server_without_a_key_gets_none(server: Imitation) -> None:
    provider = OpenAIProvider(
        base_url=f"{server.url}/openai/v1", model="some-model", api_key=None, calls=quick()
    )
    assert isinstance(await error_of(provider), KeyRejected)  # this imitation wants one
    assert "Authorization" not in server.received[0].headers


# Retries


@both
@pytest.mark.parametrize(
    "behaviour", [status(429), status(503), cut, hang_up], ids=["429", "503", "cut", "hang up"]
)
async def test_what_may_pass_is_tried_four_times_with_growing_back_off(
    server: Imitation, make: Make, behaviour: Behaviour
) -> None:
    server.script.extend([behaviour] * 3)
    provider = make(server)
    assert (await provider.embed([TEXT])).vectors.shape == (1, DIMENSIONS)
    assert len(server.received) == 4
    for number, gap in enumerate(server.gaps()):
        assert gap >= BASE_SECONDS * 2**number
    await provider.close()


@both
@pytest.mark.parametrize(
    ("behaviour", "attempts"),
    [
        (status(429), 4),
        (status(503), 4),
        (cut, 4),
        (hang_up, 4),
        (status(500), 1),
        (status(502), 1),
        (content(b"<html>"), 1),
        (content(b"[]"), 1),
        (content(b"7"), 1),
        (content(b"null"), 1),
        (content(b"{}"), 1),
        (content(b'{"data": [], "embeddings": {"float": []}}'), 1),
        (content(b'{"data": [{"index": 0, "embedding": ["0.1"]}], "embeddings": {"float": [["0.1"]]}}'), 1),
        (content(b'{"data": [{"index": 0, "embedding": []}], "embeddings": {"float": [[]]}}'), 1),
        (content(b'{"data": [{"index": 0, "embedding": null}], "embeddings": {"float": [null]}}'), 1),
        (content(b'{"data": {"index": 0}, "embeddings": "none"}'), 1),
        (content(b'{"data": [{"index": 1, "embedding": [0.1]}], "embeddings": {"int8": [[1]]}}'), 1),
    ],
)
async def test_a_provider_that_stays_broken_is_unavailable(
    server: Imitation, make: Make, behaviour: Behaviour, attempts: int
) -> None:
    server.script.extend([behaviour] * 9)
    error = await error_of(make(server))
    assert isinstance(error, ProviderUnavailable)
    assert error.code == "provider_unavailable"
    assert len(server.received) == attempts


async def test_a_component_beyond_float64_is_unusable(server: Imitation) -> None:
    server.script.append(content(b'{"data": [{"index": 0, "embedding": [1%s]}]}' % (b"0" * 400)))
    error = await error_of(openai(server))
    assert isinstance(error, ProviderUnavailable)
    assert "too large" in str(error)


@both
@pytest.mark.parametrize("behaviour", [slow(30), trickle(30)], ids=["silent", "trickle"])
async def test_a_slow_response_is_a_timeout_and_tried_again(
    server: Imitation, make: Make, behaviour: Behaviour
) -> None:
    server.script.append(behaviour)
    provider = make(server, timeout_seconds=0.2)
    began = time.monotonic()
    await provider.embed([TEXT])
    assert 0.2 <= time.monotonic() - began < 15
    server.script.extend([behaviour] * 4)
    error = await error_of(provider)
    assert isinstance(error, ProviderUnavailable)
    assert str(error) == "no response within 0.2 s"
    assert len(server.received) == 6


@both
async def test_nobody_listens(make: Make) -> None:
    error = await error_of(make(Imitation(url="http://127.0.0.1:1")))
    assert isinstance(error, ProviderUnavailable)
    assert error.status is None


@both
async def test_retry_after_is_honoured(server: Imitation, make: Make) -> None:
    server.script.append(status(429, "1"))
    provider = make(server)
    await provider.embed([TEXT])
    [gap] = server.gaps()
    assert gap >= 1
    # A shorter one than the back-off, too.
    patient = make(server, base_seconds=20.0, max_seconds=60.0)
    server.script.append(status(503, "0"))
    began = time.monotonic()
    await patient.embed([TEXT])
    assert time.monotonic() - began < 15  # up to 5 s are jitter
    await provider.close()
    await patient.close()


async def test_retry_after_delays_the_other_calls_too() -> None:
    calls = quick()
    rejected = asyncio.Event()
    rejected_at = 0.0

    async def reject_once() -> float:
        nonlocal rejected_at
        if rejected.is_set():
            return time.monotonic()
        rejected.set()
        rejected_at = time.monotonic()
        raise failure(429, "0.5")

    async def succeed() -> float:
        return time.monotonic()

    first = asyncio.create_task(calls.call(reject_once))
    await rejected.wait()
    assert await calls.call(succeed) - rejected_at >= 0.5
    assert await first - rejected_at >= 0.5


@both
async def test_a_long_retry_after_is_left_to_the_caller(server: Imitation, make: Make) -> None:
    server.script.append(status(429, "3600"))
    provider = make(server)
    error = await error_of(provider)
    assert isinstance(error, ProviderUnavailable)
    assert error.retry_after_seconds == 3600
    assert len(server.received) == 1


@pytest.mark.parametrize(
    ("header", "low", "high"),
    [
        ("7", 7, 7),
        ("0.5", 0.5, 0.5),
        ("-3", 0, 0),
        ("Sun, 06 Nov 1994 08:49:37 GMT", 0, 0),
    ],
)
def test_retry_after_is_a_number_or_a_date(header: str, low: float, high: float) -> None:
    error = failure(429, header)
    assert isinstance(error, ProviderUnavailable)
    assert error.retry_after_seconds is not None
    assert low <= error.retry_after_seconds <= high


def test_retry_after_may_be_a_date_in_the_future() -> None:
    error = failure(429, format_datetime(datetime.now(UTC) + timedelta(hours=1), usegmt=True))
    assert isinstance(error, ProviderUnavailable)
    assert error.retry_after_seconds == pytest.approx(3600, abs=30)


@pytest.mark.parametrize("header", [None, "", "soon", "nan", "inf", "Sun, 99 Nov 1994"])
def test_another_retry_after_is_ignored(header: str | None) -> None:
    error = failure(503, header)
    assert isinstance(error, ProviderUnavailable)
    assert error.retry_after_seconds is None


async def test_the_rate_limit_spaces_all_attempts_evenly() -> None:
    began = time.monotonic()
    calls = quick(calls_per_minute=600)
    attempts: list[float] = []

    async def fail_once() -> None:
        attempts.append(time.monotonic())
        if len(attempts) == 1:
            raise failure(503, None)

    await asyncio.gather(*(calls.call(fail_once) for _ in range(4)))
    assert len(attempts) == 5
    for number, at_ in enumerate(attempts):
        assert at_ - began >= 0.1 * number


# What an operator or a producer has to correct


@both
@pytest.mark.parametrize("code", [401, 403])
async def test_a_wrong_key_has_an_error_of_its_own(server: Imitation, make: Make, code: int) -> None:
    server.script.append(status(code))
    error = await error_of(make(server))
    assert isinstance(error, KeyRejected)
    assert error.code == "key_rejected"
    assert len(server.received) == 1


@both
async def test_a_key_that_the_server_does_not_know(server: Imitation, make: Make) -> None:
    assert isinstance(await error_of(make(server, key="other")), KeyRejected)


@both
@pytest.mark.parametrize("key", [f"{KEY}\n", "schlüssel", ""])
async def test_a_key_that_no_header_can_carry(server: Imitation, make: Make, key: str) -> None:
    with pytest.raises(KeyRejected) as caught:
        await make(server, key=key).embed([TEXT])
    assert KEY not in str(caught.value)


@both
async def test_an_unknown_model(server: Imitation, make: Make) -> None:
    error = await error_of(make(server, model="nix"))
    assert type(error) is ProviderMisconfigured
    assert "HTTP 404" in str(error)


@both
async def test_a_redirect_is_not_followed(server: Imitation, make: Make) -> None:
    """It would send the key and the text to a server that nobody configured."""
    server.script.append(redirect(f"{server.url}/elsewhere"))
    error = await error_of(make(server))
    assert type(error) is ProviderMisconfigured
    assert [request.path for request in server.received] != ["/elsewhere"]
    assert len(server.received) == 1


@both
async def test_passwords_of_netrc_are_not_sent(
    server: Imitation, make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("default login somebody password secret\n", encoding="utf-8")
    monkeypatch.setenv("NETRC", str(netrc))
    provider = make(server)
    await provider.embed([TEXT])
    await provider.close()
    assert server.received[0].headers["Authorization"] == f"Bearer {KEY}"


@both
async def test_the_proxy_in_the_environment_is_used(
    server: Imitation, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", server.url.replace("://", "://user:password@"))
    path = "/cohere" if make is cohere else "/openai/v1"
    provider = make(Imitation(url=f"http://provider.invalid{path}"))
    await provider.embed([TEXT])
    await provider.close()
    headers = server.received[0].headers
    assert (headers["Host"], headers["Proxy-Authorization"]) == (
        "provider.invalid",
        "Basic dXNlcjpwYXNzd29yZA==",
    )


@pytest.mark.parametrize(
    "url", ["", "localhost:8080/v1", "ftp://example.org", "http://", "http://h:x", f"http://user:{KEY}@h"]
)
@both
def test_an_unusable_address(make: Make, url: str) -> None:
    with pytest.raises(ProviderMisconfigured, match="address") as caught:
        make(Imitation(url=url))
    assert KEY not in str(caught.value)


@both
async def test_a_batch_with_a_text_that_is_too_long_is_rejected(server: Imitation, make: Make) -> None:
    error = await error_of(make(server), "short", "x" * 5000)
    assert isinstance(error, TextRejected)


@both
async def test_a_single_text_that_is_too_long_is_truncated(server: Imitation, make: Make) -> None:
    provider = make(server)
    server.max_characters = 1300
    text = "".join(chr(0x4E00 + number % 900) for number in range(5000))
    embedded = await provider.embed([text])
    assert embedded.truncated == [True]
    kept = 1300 if make is cohere else 1250
    assert np.array_equal(embedded.vectors[0], np.array(vector(text[:kept]), dtype=np.float32))
    await provider.close()


@both
async def test_a_single_text_that_is_rejected_whatever_its_length(server: Imitation, make: Make) -> None:
    server.max_characters = -1
    server.script.extend([status(400)] * 20)
    assert isinstance(await error_of(make(server), "x" * 5000), TextRejected)
    assert len(server.received) <= 8


# Packages


@pytest.mark.parametrize(("make", "package"), [(cohere, "cohere"), (openai, "aiohttp")])
def test_a_missing_package_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, make: Make, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ProviderMisconfigured) as caught:
        make(Imitation(url="http://localhost"))
    extra = make.__name__
    assert str(caught.value) == f"the package {package} is not installed: pip install 'anabranch[{extra}]'"
