"""LangChain with a model that was trained to call functions: it decides itself that it calls one, and uses the result."""

import sys

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

QUESTION = "What is the weather in Lindau?"


@tool
def get_weather(town: str) -> str:
    """The weather in a town."""
    return "hail, 3 degrees"


model = ChatOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", model="any", max_retries=0, temperature=0)
with_tools = model.bind_tools([get_weather])
history = [HumanMessage(QUESTION)]
first = with_tools.invoke(history)
assert [call["args"] for call in first.tool_calls] == [{"town": "Lindau"}], first
history += [first, get_weather.invoke(first.tool_calls[0])]
# The model is too small to stop calling by itself.
answer = model.bind_tools([get_weather], tool_choice="none").invoke(history)
assert "hail" in answer.content.lower(), answer
print("ok")
