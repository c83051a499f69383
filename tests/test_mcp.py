"""The Model Context Protocol, with its official client, over HTTP and over standard input and output."""

import asyncio
import json
import urllib.parse

from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client

from conftest import EMBEDDER, HALO, MODEL


async def check_tools(session, name):
    await session.initialize()
    tools = {tool.name: tool for tool in (await session.list_tools()).tools}
    assert set(tools) == {
        "recall",
        "recall_everywhere",
        "list_conversations",
        "read_chunk",
        "remember",
        "pin",
        "resurrect",
        "notes",
    }
    assert all(tool.output_schema["type"] == "object" for tool in tools.values())
    hit = tools["recall"].output_schema["properties"]["hits"]["items"]["properties"]
    assert {"text", "relevance", "score", "reason", "when"} <= set(hit), hit
    assert tools["recall"].input_schema["required"] == ["query"] and tools["recall"].annotations.read_only_hint

    async def call(tool, is_error=False, **values):
        result = await session.call_tool(tool, {"conversation": name, **values})
        assert bool(result.is_error) == is_error, result
        return result.content[0].text

    assert "no conversation" in await call("recall", is_error=True, query="anything")
    for text in ("The garden gate is green.", "Anna was born in Rome.", "The ferry leaves at seven."):
        assert "kept" in await call("remember", text=text)
    hits = json.loads(await call("recall", query="where was Anna born", most=1))["hits"]
    assert [hit["text"] for hit in hits] == ["Anna was born in Rome."] and hits[0]["in_window"]
    assert hits[0]["reason"] and hits[0]["when"].startswith("20"), hits
    chunk = hits[0]["chunk"]
    assert chunk in await call("pin", chunk=chunk)
    assert "no chunk" in await call("pin", is_error=True, chunk="u99.0")
    assert await call("notes") == "{}"
    assert await call("notes", text='{"gate": "green"}') == "noted"
    assert json.loads(await call("notes")) == {"gate": "green"}
    assert "JSON" in await call("notes", is_error=True, text="{")
    await check_resources(session, name)
    await check_prompts(session)
    return chunk


async def check_resources(session, name):
    """A conversation is a resource, listed and by its template."""
    uri = f"halo://conversation/{urllib.parse.quote(name, safe='')}"
    listed = {str(resource.uri): resource.name for resource in (await session.list_resources()).resources}
    assert listed.get(uri) == name, listed
    templates = (await session.list_resource_templates()).resource_templates
    assert [template.uri_template for template in templates] == ["halo://conversation/{name}"], templates
    text = (await session.read_resource(uri)).contents[0].text
    assert text.index("The garden gate is green.") < text.index("Anna was born in Rome."), text


async def check_prompts(session):
    prompts = {prompt.name: prompt for prompt in (await session.list_prompts()).prompts}
    assert set(prompts) == {"answer_from_memory", "remember_this"}
    assert [(argument.name, argument.required) for argument in prompts["remember_this"].arguments] == [("text", True)]
    prompt = await session.get_prompt("answer_from_memory", {"question": "Where was Anna born?"})
    assert "Where was Anna born?" in prompt.messages[0].content.text and prompt.messages[0].role == "user"


def test_mcp_over_http(server):
    async def run():
        async with streamable_http_client(f"{server.url}/mcp") as (read, write), ClientSession(read, write) as session:
            return await check_tools(session, "mcp over http")

    chunk = asyncio.run(run())
    state = server.halo("GET", f"/conversations/{urllib.parse.quote('mcp over http')}")[1]
    assert [chunk_state["id"] for chunk_state in state["chunks"] if chunk_state["pinned"]] == [chunk]


def test_mcp_over_stdio(tmp_path):
    arguments = ["mcp", "--data", tmp_path, "--model", MODEL, "--set", f"recall.embedder={EMBEDDER}"]
    parameters = StdioServerParameters(command=str(HALO), args=[str(part) for part in arguments])

    async def run():
        async with stdio_client(parameters) as (read, write), ClientSession(read, write) as session:
            await check_tools(session, "mcp")

    asyncio.run(run())
