"""pydantic-ai with a model that was trained to call functions: it decides itself that it calls one, and uses the result."""

import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

QUESTION = "Use the function to find out how the weather in Lindau is. Then tell me."

for kind in (OpenAIChatModel, OpenAIResponsesModel):
    model = kind("any", provider=OpenAIProvider(base_url=f"{sys.argv[1]}/v1", api_key="none"))
    agent = Agent(model, retries=0, model_settings={"temperature": 0})
    towns = []

    @agent.tool_plain
    def get_weather(town: str) -> str:
        """The weather in a town."""
        towns.append(town)
        return "hail, 3 degrees"

    answer = agent.run_sync(QUESTION).output
    assert towns and set(towns) == {"Lindau"}, (kind, towns)
    assert "hail" in answer.lower(), (kind, answer)
print("ok")
