"""Several clients at once: a short run of the program that `make soak` runs for two hours."""

import json
import os
import subprocess
import sys

from conftest import HALO, ROOT


def test_eight_clients_at_once(tmp_path):
    result = tmp_path / "result.json"
    command = [sys.executable, ROOT / "scripts/soak-batch", "--minutes", "0.2", "--result", result]
    env = {**os.environ, "HALO_BIN": str(HALO), "HALO_TEST_MODEL": str(ROOT / "target/models/tiny-llama.gguf")}
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=600, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(result.read_text())
    assert report["done"] and report["tables_compared"] > 500 and report["tables_wrong"] == 0, report
