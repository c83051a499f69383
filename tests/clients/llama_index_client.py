"""LlamaIndex. The argument is the address of a server whose model answers as tests/soak_clients.py says."""

import sys

from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel


class Bird(BaseModel):
    """A bird."""

    name: str
    legs: int


def get_weather(town: str) -> str:
    """The weather in a town."""
    return f"sunny in {town}"


llm = OpenAILike(
    model="any",
    api_base=f"{sys.argv[1]}/v1",
    api_key="none",
    is_chat_model=True,
    is_function_calling_model=True,
    context_window=8192,
    max_retries=0,
)
history = [ChatMessage(role="user", content="Who are you, and where do you live?")]
assert llm.chat(history).message.content.strip() == "I am a heron."
streamed = "".join(
    part.delta or "" for part in llm.stream_chat([ChatMessage(role="user", content="And where is that?")])
)
assert streamed.strip() == "I live by the lake.", streamed
result = llm.predict_and_call([FunctionTool.from_defaults(get_weather)], "How is the weather in Lindau?")
assert str(result) == "sunny in Lindau", result
# With a function that has the schema, and with response_format.
bird = llm.structured_predict(Bird, PromptTemplate("A bird as JSON"))
assert bird == Bird(name="heron", legs=2), bird
llm.should_use_structured_outputs = True
bird = llm.structured_predict(Bird, PromptTemplate("Another bird as JSON"))
assert bird == Bird(name="heron", legs=2), bird

embedder = OpenAILikeEmbedding(model_name="any", api_base=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
vectors = embedder.get_text_embedding_batch(["a heron", "a lake"])
assert len(vectors) == 2 and len(vectors[0]) == len(vectors[1]) > 0
assert len(embedder.get_query_embedding("a heron")) == len(vectors[0])
print("ok")
