"""A model that was trained to call functions, with four clients: it decides itself that it calls a function, and answers with its
result. `scripts/tool-model` fetches the model and runs this."""

import os
import pathlib
import subprocess

import pytest

from conftest import ROOT, Server

CLIENTS = ROOT / "target/clients"
MODEL = pathlib.Path(
    os.environ.get("HALO_TEST_TOOL_MODEL", ROOT / "target/tool-model/models/Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf")
)


@pytest.fixture
def tool_server(tmp_path):
    server = Server(tmp_path, "generation.max_tokens=128", model=MODEL).start()
    yield server
    server.stop()


SCRIPTS = ["tool_model_openai.py", "tool_model_langchain.py", "tool_model_vercel.mjs", "tool_model_pydantic_ai.py"]


@pytest.mark.parametrize("client", SCRIPTS)
def test_model_calls_functions_of(client, tool_server):
    script = ROOT / "tests/clients" / client
    if script.suffix == ".mjs":
        # Node looks for packages beside a script.
        copy = CLIENTS / client
        copy.write_text(script.read_text())
        command = ["node", copy]
    else:
        command = [CLIENTS / "venv/bin/python", script]
    result = subprocess.run([*command, tool_server.url], capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}\n{''.join(tool_server.log[-20:])}"
    assert result.stdout.strip().endswith("ok")
