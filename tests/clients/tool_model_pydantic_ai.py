"""pydantic-ai with a model that was trained to call functions: it decides itself that it calls one, and uses the result."""

import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

QUESTION = "What is the weather in Lindau?"

for kind in (OpenAIChatModel, OpenAIResponsesModel):
    model = kind("any", provider=OpenAIProvider(base_url=f"{sys.argv[1]}/v1", api_key="none"))
    agent = Agent(model, retries=0, model_settings={"temperature": 0})
    towns = []

    # The model is too small to stop calling by itself.
    async def once(_context, definition, towns=towns):
        return None if towns else definition

    @agent.tool_plain(prepare=once)
    def get_weather(town: str) -> str:
        """The weather in a town."""
        towns.append(town)
        return "hail, 3 degrees"

    answer = agent.run_sync(QUESTION).output
    assert towns and set(towns) == {"Lindau"}, (kind, towns)
    assert "hail" in answer.lower(), (kind, answer)
print("ok")
