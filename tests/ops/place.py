"""What all scenarios of a run share, started before the first one: starting servers would slow their events down."""

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import PostgresServer
from tests.faults.stack import Cluster, Servers
from tests.ops.prometheus import Prometheus

__all__ = ["Place", "open_place"]

# Workers of many installations share a server.
_MAX_CONNECTIONS = "400"


class _SharedStore(Servers):
    """A proxy of its own before a server that others use too."""

    def __init__(self, jars: Path, shared: Servers) -> None:
        super().__init__(jars)
        self._shared = shared

    async def store(self) -> PostgresServer:
        store = await self._shared.store()
        self.store_proxy.target = store.embedded.port
        return store


@dataclass(frozen=True)
class Place:
    """Servers.

    Attributes:
        jars: of Kafka.
        prometheus: the only one.
        cluster: the broker of all installations without one of their own.
        clusters: of installations that have their own.
        shared: the store of all installations without one of their own.
        stores: of installations that have their own.
    """

    jars: Path
    prometheus: Prometheus
    cluster: Cluster
    clusters: Mapping[str, Cluster]
    shared: Servers
    stores: Mapping[str, Servers]

    def cluster_of(self, namespace: str) -> Cluster:
        return self.clusters.get(namespace, self.cluster)

    def servers_of(self, namespace: str) -> Servers:
        """To be opened: with a proxy of its own."""
        return _SharedStore(self.jars, self.stores.get(namespace, self.shared))


@asynccontextmanager
async def open_place(
    jars: Path,
    *,
    own_brokers: Collection[str] = (),
    own_stores: Collection[str] = (),
    rule_file: str | None = None,
) -> AsyncIterator[Place]:
    """Starts everything.

    Args:
        jars: of Kafka.
        own_brokers: namespaces whose broker is their own.
        own_stores: namespaces whose store is their own.
        rule_file: instead of the compressed rules.
    """
    async with AsyncExitStack() as open_now:
        prometheus = await open_now.enter_async_context(Prometheus(rule_file=rule_file))
        clusters = {name: Cluster(jars, brokers=1) for name in ("", *own_brokers)}
        stores = {
            name: Servers(jars, store_settings={"max_connections": _MAX_CONNECTIONS})
            for name in ("", *own_stores)
        }
        for cluster in clusters.values():
            await open_now.enter_async_context(cluster)
        for servers in stores.values():
            await open_now.enter_async_context(servers)
        await asyncio.gather(*(servers.store() for servers in stores.values()))
        yield Place(jars, prometheus, clusters.pop(""), clusters, stores.pop(""), stores)
