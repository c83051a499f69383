"""The same conversation with a function through three clients: OpenAI's own, LangChain and pydantic-ai.

`make soak` runs it: the two frameworks are too large for the packages of every test run.
"""

import json

import openai
import pytest

from conftest import Server

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"town": "Lindau"}}\n</tool_call>'
ANSWER = "It is sunny in Lindau."


@pytest.fixture
def url(tmp_path):
    script = tmp_path / "answers.txt"
    script.write_text(f"{CALL}\n---\n{ANSWER}\n")
    server = Server(tmp_path / "data", model=f"scripted:{script}").start()
    yield f"{server.url}/v1"
    server.stop()


def test_openai_runs_a_function(url):
    api = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    function = {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    }
    tools = [{"type": "function", "function": function}]
    messages = [{"role": "user", "content": "How is the weather in Lindau?"}]
    first = api.chat.completions.create(model="any", messages=messages, tools=tools).choices[0].message
    call = first.tool_calls[0]
    assert json.loads(call.function.arguments) == {"town": "Lindau"}
    messages += [first, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    second = api.chat.completions.create(model="any", messages=messages, tools=tools)
    assert second.choices[0].message.content.strip() == ANSWER


def test_langchain_runs_a_function(url):
    openai_chat = pytest.importorskip("langchain_openai")
    tools = pytest.importorskip("langchain_core.tools")
    messages = pytest.importorskip("langchain_core.messages")

    @tools.tool
    def get_weather(town: str) -> str:
        """The weather in a town."""
        return f"sunny in {town}"

    model = openai_chat.ChatOpenAI(base_url=url, api_key="none", model="any").bind_tools([get_weather])
    history = [messages.HumanMessage("How is the weather in Lindau?")]
    first = model.invoke(history)
    assert first.tool_calls[0]["args"] == {"town": "Lindau"}
    history += [first, get_weather.invoke(first.tool_calls[0])]
    assert model.invoke(history).content.strip() == ANSWER


def test_pydantic_ai_runs_a_function(url):
    pydantic_ai = pytest.importorskip("pydantic_ai")
    models = pytest.importorskip("pydantic_ai.models.openai")
    providers = pytest.importorskip("pydantic_ai.providers.openai")
    provider = providers.OpenAIProvider(base_url=url, api_key="none")
    agent = pydantic_ai.Agent(models.OpenAIChatModel("any", provider=provider))
    towns = []

    @agent.tool_plain
    def get_weather(town: str) -> str:
        """The weather in a town."""
        towns.append(town)
        return "sunny"

    result = agent.run_sync("How is the weather in Lindau?")
    assert (towns, result.output.strip()) == (["Lindau"], ANSWER)
