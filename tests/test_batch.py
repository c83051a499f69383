"""Several clients at once: a short run of the program that `make soak` runs for two hours."""

import json
import os
import pathlib
import subprocess
import sys

from conftest import HALO, ROOT, Server, wait_for


def test_eight_clients_at_once(tmp_path):
    result = tmp_path / "result.json"
    command = [sys.executable, ROOT / "scripts/soak-batch", "--minutes", "0.2", "--result", result]
    env = {**os.environ, "HALO_BIN": str(HALO), "HALO_TEST_MODEL": str(ROOT / "target/models/tiny-llama.gguf")}
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=600, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(result.read_text())
    assert report["done"] and report["tables_compared"] > 500 and report["tables_wrong"] == 0, report


def test_only_the_thread_of_the_model_has_threads_of_openmp(tmp_path):
    """OpenMP keeps threads for each thread that has decoded. Where these are more than the cores, all of them sleep between two
    graphs instead of spinning, and a token takes a fifth longer. A thread has the name of the one that started it."""
    server = Server(tmp_path, "generation.max_tokens=4", "recall.mode=lexical").start()
    tasks = pathlib.Path(f"/proc/{server.process.pid}/task")

    def names():
        return [(task / "comm").read_text().strip() for task in tasks.iterdir()]

    try:
        server.say("main", "Hello.")
        wait_for(lambda: names().count("halo") == 1 and "halo-load" not in names())
        assert "halo-model" in names()
    finally:
        server.stop()
