"""pydantic-ai. The argument is the address of a server whose model answers as tests/test_clients.py says."""

import asyncio
import sys

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Bird(BaseModel):
    """A bird."""

    name: str
    legs: int


def connect():
    return OpenAIChatModel("any", provider=OpenAIProvider(base_url=f"{sys.argv[1]}/v1", api_key="none"))


model = connect()
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


async def stream_text():
    # The connections of the other one belong to the event loop of `run_sync`: the client would send the request twice.
    async with Agent(connect(), retries=0).run_stream("And where do you live?") as result:
        return "".join([part async for part in result.stream_text(delta=True)])


streamed = asyncio.run(stream_text())
assert streamed.strip() == "I live by the lake.", streamed
print("ok")
