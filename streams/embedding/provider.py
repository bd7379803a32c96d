"""What a provider is: text in, vectors out."""

from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from importlib import import_module
from types import ModuleType
from typing import Protocol
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt
from pydantic import SecretStr

from streams.core.embedding_errors import KeyRejected, ProviderMisconfigured, ProviderUnavailable

__all__ = ["Embedded", "Provider", "Vectors", "as_vectors", "header_value", "load_package", "usable_url"]

Vectors = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Embedded:
    """A batch's embeddings.

    Attributes:
        vectors: shape (texts, dimensions), as the model returns them: of any length, perhaps not finite.
        truncated: for each text, whether only its beginning was embedded.
    """

    vectors: Vectors
    truncated: Sequence[bool]


class Provider(Protocol):
    """The interface of all providers."""

    async def embed(self, texts: Sequence[str], *, dimensions: int | None = None) -> Embedded:
        """Embed at least one text; none is blank.

        A single text that is too long for the model is truncated. In a batch, it may be `TextRejected` instead.

        Args:
            texts: the texts.
            dimensions: ask the model for so many; None: as many as it has.

        Raises:
            TextRejected: at least one of the texts is not accepted.
            ProviderUnavailable: the provider cannot be reached, or fails.
            ProviderMisconfigured: settings are wrong.
        """
        ...

    async def close(self) -> None: ...


def as_vectors(rows: object, texts: int) -> Vectors:
    """The rows of a response, shape (texts, dimensions).

    Raises:
        ProviderUnavailable: they are not one list of numbers for each text, all of the same length.
    """
    if not isinstance(rows, list) or len(rows) != texts:
        raise _unusable("it does not contain one embedding for each text")
    for row in rows:
        if not isinstance(row, list) or not row or len(row) != len(rows[0]):
            raise _unusable("its embeddings have different lengths, or none")
        if any(type(component) not in (int, float) for component in row):
            raise _unusable("a component is not a number")
    try:
        with np.errstate(over="ignore"):  # too large becomes infinite, which is checked with the rest
            return np.array(rows, dtype=np.float64).astype(np.float32)
    except OverflowError:  # an integer beyond float64
        raise _unusable("a component is too large") from None


def _unusable(why: str) -> ProviderUnavailable:
    return ProviderUnavailable(f"the provider's response is unusable: {why}", status=HTTPStatus.OK)


def header_value(secret: SecretStr) -> str:
    """The value of a header that contains a key.

    Raises:
        KeyRejected: HTTP cannot carry it, for example because it contains a line break.
    """
    value = secret.get_secret_value()
    if not (value and value == value.strip() and value.isascii() and value.isprintable()):
        raise KeyRejected(
            "the API key is empty, or contains what a key cannot have, for example a line break"
        )
    return value


def usable_url(base_url: str) -> str:
    """A provider's address, without a slash at its end.

    Raises:
        ProviderMisconfigured: it is not the address of a server, or contains a password, which is not secret there.
    """
    try:
        parts = urlsplit(base_url)
        usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise ProviderMisconfigured(
            "the provider's address is not a URL that begins with http:// or https://"
        )
    if parts.username is not None:
        raise ProviderMisconfigured("the provider's address contains a user name or password")
    return base_url.rstrip("/")


def load_package(name: str, *, extra: str) -> ModuleType:
    """Import a package of an optional extra.

    Raises:
        ProviderMisconfigured: it is not installed; the message says how to install it.
    """
    try:
        return import_module(name)
    except ImportError:
        raise ProviderMisconfigured(
            f"the package {name} is not installed: pip install 'anabranch[{extra}]'"
        ) from None
