"""LangChain. The argument is the address of a server whose model answers as tests/test_clients.py says."""

import sys

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

URL = f"{sys.argv[1]}/v1"


class Bird(BaseModel):
    """A bird."""

    name: str
    legs: int


@tool
def get_weather(town: str) -> str:
    """The weather in a town."""
    return f"sunny in {town}"


model = ChatOpenAI(base_url=URL, api_key="none", model="any", max_retries=0)
assert model.invoke("Who are you, and where do you live?").content.strip() == "I am a heron."
streamed = "".join(chunk.content for chunk in model.stream("And where is that?"))
assert streamed.strip() == "I live by the lake.", streamed

with_tools = model.bind_tools([get_weather])
history = [HumanMessage("How is the weather in Lindau?")]
first = with_tools.invoke(history)
assert first.tool_calls[0]["args"] == {"town": "Lindau"}, first
history += [first, get_weather.invoke(first.tool_calls[0])]
assert with_tools.invoke(history).content.strip() == "It is sunny in Lindau."

bird = model.with_structured_output(Bird, method="json_schema").invoke("A bird as JSON")
assert bird == Bird(name="heron", legs=2), bird
bird = model.with_structured_output(Bird, method="function_calling").invoke("Another bird as JSON")
assert bird == Bird(name="heron", legs=2), bird

vectors = OpenAIEmbeddings(base_url=URL, api_key="none", model="any", check_embedding_ctx_length=False).embed_documents(
    ["a heron", "a lake"]
)
assert len(vectors) == 2 and len(vectors[0]) == len(vectors[1]) > 0

# A stream that the client leaves frees the model for the next question.
stream = model.stream("Tell me a very long story.")
assert next(stream).content is not None
stream.close()
assert model.invoke("Are you there?").content.strip() == "I am here."
print("ok")
