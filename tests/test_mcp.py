"""The Model Context Protocol, with its official client, over HTTP and over standard input and output."""

import asyncio
import json
import urllib.parse

from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client

from conftest import EMBEDDER, HALO, MODEL


async def talk(session, name):
    await session.initialize()
    tools = {tool.name: tool for tool in (await session.list_tools()).tools}
    assert set(tools) == {"recall", "remember", "pin", "resurrect", "notes"}
    assert tools["recall"].input_schema["required"] == ["query"] and tools["recall"].annotations.read_only_hint

    async def call(tool, wrong=False, **values):
        result = await session.call_tool(tool, {"conversation": name, **values})
        assert bool(result.is_error) == wrong, result
        return result.content[0].text

    assert "no conversation" in await call("recall", wrong=True, query="anything")
    for text in ("The garden gate is green.", "Anna was born in Rome.", "The ferry leaves at seven."):
        assert "kept" in await call("remember", text=text)
    found = json.loads(await call("recall", query="where was Anna born", most=1))
    assert [one["text"] for one in found] == ["Anna was born in Rome."] and found[0]["in_window"]
    chunk = found[0]["chunk"]
    assert chunk in await call("pin", chunk=chunk)
    assert "no chunk" in await call("pin", wrong=True, chunk="u99.0")
    assert await call("notes") == "{}"
    assert await call("notes", text='{"gate": "green"}') == "noted"
    assert json.loads(await call("notes")) == {"gate": "green"}
    assert "JSON" in await call("notes", wrong=True, text="{")
    return chunk


def test_mcp_over_http(server):
    async def run():
        async with streamable_http_client(f"{server.url}/mcp") as (read, write), ClientSession(read, write) as session:
            return await talk(session, "mcp over http")

    chunk = asyncio.run(run())
    state = server.halo("GET", f"/conversations/{urllib.parse.quote('mcp over http')}")[1]
    assert [one["id"] for one in state["chunks"] if one["pinned"]] == [chunk]


def test_mcp_over_stdio(tmp_path):
    arguments = ["mcp", "--data", tmp_path, "--model", MODEL, "--set", f"recall.embedder={EMBEDDER}"]
    parameters = StdioServerParameters(command=str(HALO), args=[str(part) for part in arguments])

    async def run():
        async with stdio_client(parameters) as (read, write), ClientSession(read, write) as session:
            await talk(session, "mcp")

    asyncio.run(run())
