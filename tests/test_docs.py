"""The examples of the documentation and of the crates, run as they are written."""

import re
import subprocess

import pytest

from conftest import ROOT

CLIENTS = ROOT / "target/clients"
CONNECT = (ROOT / "docs/connect.md").read_text()
ANSWER = "She lives in Lindau."


def blocks(heading, language):
    """The code blocks of a section of docs/connect.md in a language."""
    section = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", CONNECT, re.M | re.S)[1]
    found = re.findall(rf"^ *```{language}\n(.*?)^ *```", section, re.M | re.S)
    assert found, f"{heading} has no example in {language}"
    return found


def run(command, text=None):
    result = subprocess.run(
        [str(part) for part in command], input=text, capture_output=True, text=True, timeout=120, cwd=CLIENTS
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result.stdout


def at(server, code):
    assert "http://127.0.0.1:5001" in code
    return code.replace("http://127.0.0.1:5001", server.url)


def test_python_examples_of_connect(scripted):
    server = scripted("Noted.", ANSWER)
    # The second example goes on with the client of the first.
    code = "\n".join(blocks("OpenAI clients", "python")) + "\nprint(answer.choices[0].message.content)\n"
    said = run([CLIENTS / "venv/bin/python", "-c", at(server, code)])
    assert [line.strip() for line in said.splitlines()] == ["Noted.", ANSWER]
    assert server.halo("GET", "/conversations/family")[0] == 200


def test_ollama_example_of_connect(scripted):
    code = blocks("Ollama clients", "python")[0] + "\nprint(answer.message.content)\n"
    assert run([CLIENTS / "venv/bin/python", "-c", at(scripted(ANSWER), code)]).strip() == ANSWER


def test_javascript_example_of_connect(scripted):
    script = CLIENTS / "example.mjs"
    script.write_text(at(scripted(ANSWER), blocks("OpenAI clients", "js")[0]))
    assert run(["node", script]).strip() == ANSWER


def test_curl_example_of_connect(scripted):
    said = run(["sh", "-c", at(scripted(ANSWER), blocks("OpenAI clients", "sh")[0])])
    assert ANSWER in said


@pytest.mark.parametrize(
    "crate, name, expected",
    [
        (
            "core",
            "prune_and_resurrect",
            [
                "said: u0.0 “My sister Anna lives in Lindau.”, a1.0 “I will remember that.”, "
                "u2.0 “How are lighthouses built?”, a3.0 “On rock, with thick walls.”",
                r"pruned u0\.0: .*19 tokens live, 10 allowed.*",
                r"pruned a1\.0: .*",
                "pruned: u2.0 “How are lighthouses built?”, a3.0 “On rock, with thick walls.”",
                "resurrected: u0.0 “My sister Anna lives in Lindau.”, a1.0 “I will remember that.”, "
                "u2.0 “How are lighthouses built?”, a3.0 “On rock, with thick walls.”",
            ],
        ),
        (
            "agents",
            "cooled_agent",
            ["I have read 13 characters.", "I have read 40 characters.", r".*the king of switzerland resign.*"],
        ),
    ],
)
def test_examples_of_the_crates(crate, name, expected):
    program = ROOT / "target/debug/examples" / name
    if not program.exists():
        subprocess.run(
            ["cargo", "build", "--locked", "--package", f"halo-{crate}", "--example", name], check=True, cwd=ROOT
        )
    said = run([program]).splitlines()
    assert len(said) == len(expected), said
    for line, pattern in zip(said, expected, strict=True):
        assert line == pattern or re.fullmatch(pattern, line), (line, pattern)
