from streams.adapters import SharedClient
from streams.adapters.langchain import AnabranchRetriever
from streams.client import Client

with SharedClient(Client.from_environment()) as client:
    retriever = AnabranchRetriever(client=client, principals=["user:1"])
    for document in retriever.invoke("Can a ripple travel upstream against the current?"):
        print(f"{document.metadata['score']:.3f} {document.metadata['title']}: {document.page_content}")
