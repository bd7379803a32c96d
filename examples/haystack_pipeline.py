from haystack import Pipeline
from haystack.components.builders import PromptBuilder

from streams.adapters.haystack import AnabranchRetriever

TEMPLATE = """Answer from these passages only:
{% for document in documents %}
{% if document.meta.header %}{{ document.meta.header }}
{% endif %}{{ document.content }}
{% endfor %}
Question: {{ question }}"""

pipeline = Pipeline()
pipeline.add_component("retriever", AnabranchRetriever(profile="chat"))
pipeline.add_component("prompt", PromptBuilder(TEMPLATE, required_variables="*"))
pipeline.connect("retriever.documents", "prompt.documents")

question = "Can a ripple travel upstream against the current?"
asked = {"query": question, "principals": ["user:1"]}
print(pipeline.run({"retriever": asked, "prompt": {"question": question}})["prompt"]["prompt"])
pipeline.close()
