import asyncio

from llama_index.core.schema import MetadataMode

from streams.adapters import SharedClient
from streams.adapters.llamaindex import AnabranchRetriever
from streams.client import Client


async def main() -> None:
    with SharedClient(Client.from_environment()) as client:
        retriever = AnabranchRetriever(client, principals=["user:1"])
        for found in await retriever.aretrieve("Can a ripple travel upstream against the current?"):
            print(f"{found.score:.3f} {found.node.metadata['title']}")
            print(found.node.get_content(MetadataMode.LLM))  # as a language model gets it


asyncio.run(main())
