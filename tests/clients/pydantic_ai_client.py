"""pydantic-ai. The argument is the address of a server whose model answers as tests/test_clients.py says."""

import sys

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Bird(BaseModel):
    """A bird."""

    name: str
    legs: int


model = OpenAIChatModel("any", provider=OpenAIProvider(base_url=f"{sys.argv[1]}/v1", api_key="none"))
agent = Agent(model, retries=0)
towns = []


@agent.tool_plain
def get_weather(town: str) -> str:
    """The weather in a town."""
    towns.append(town)
    return "sunny"


assert agent.run_sync("How is the weather in Lindau?").output.strip() == "It is sunny in Lindau."
assert towns == ["Lindau"]

# The default is a call of a function that has the schema; the second one is response_format.
for output in (Bird, NativeOutput(Bird)):
    result = Agent(model, output_type=output, retries=0).run_sync("A bird as JSON")
    assert result.output == Bird(name="heron", legs=2), result
print("ok")
