"""The minor versions of the contracts, and the dimensions of embeddings that they allow."""

from typing import Final, Literal, get_args

__all__ = ["CONTRACT_VERSIONS", "DIMENSIONS", "MAX_DIMENSIONS", "ContractVersion"]

#: The minor versions of query events and results, oldest first. Both contracts have the same ones.
ContractVersion = Literal["1.0.0", "1.1.0"]
CONTRACT_VERSIONS: Final[tuple[ContractVersion, ...]] = get_args(ContractVersion)
#: The number of components that 1.0.0 knows, and the default of a deployment.
DIMENSIONS: Final = 768
#: pgvector indexes up to so many in half precision.
MAX_DIMENSIONS: Final = 4000
