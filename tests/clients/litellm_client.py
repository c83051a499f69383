"""litellm, with its clients for OpenAI's and Ollama's API. The argument is the address of a server whose model answers as
tests/soak_clients.py says."""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm
from pydantic import BaseModel

URL = sys.argv[1]
OPENAI = {"model": "openai/any", "api_base": f"{URL}/v1", "api_key": "none", "num_retries": 0}
OLLAMA = {"model": "ollama_chat/any", "api_base": URL, "num_retries": 0}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a town",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    },
}


class Bird(BaseModel):
    """A bird."""

    name: str
    legs: int


def ask(text):
    return [{"role": "user", "content": text}]


for options in (OPENAI, OLLAMA):
    answer = litellm.completion(messages=ask("Who are you, and where do you live?"), **options)
    assert answer.choices[0].message.content.strip() == "I am a heron.", answer
    parts = litellm.completion(messages=ask("And where is that?"), stream=True, **options)
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text.strip() == "I live by the lake.", text
for options in (OPENAI, OLLAMA):
    called = litellm.completion(messages=ask("How is the weather in Lindau?"), tools=[TOOL], **options)
    assert json.loads(called.choices[0].message.tool_calls[0].function.arguments) == {"town": "Lindau"}, called
for options in (OPENAI, OLLAMA):
    answer = litellm.completion(messages=ask("A bird as JSON"), response_format=Bird, **options)
    assert Bird.model_validate_json(answer.choices[0].message.content) == Bird(name="heron", legs=2), answer
vectors = litellm.embedding(model="openai/any", input=["a heron", "a lake"], api_base=f"{URL}/v1", api_key="none")
assert len(vectors.data) == 2
print("ok")
