"""Limits: open files, threads, memory, and very long histories."""

import concurrent.futures
import json
import os
import pathlib
import resource
import signal
import subprocess
import threading
import time

from conftest import HALO, Server

ONE_SHOTS = int(os.environ.get("HALO_ONE_SHOTS", "600"))
LONG_HISTORY = int(os.environ.get("HALO_LONG_HISTORY", "60000"))


def test_limit_on_open_files_is_raised(model, tmp_path):
    server = ServerWithFileLimit((64, 512), tmp_path, "recall.mode=lexical", model=model_address(model)).start()
    try:
        limits = pathlib.Path(f"/proc/{server.process.pid}/limits").read_text()
        assert [line.split()[3:5] for line in limits.splitlines() if line.startswith("Max open files")] == [
            ["512", "512"]
        ]
    finally:
        server.stop()


class ServerWithFileLimit(Server):
    """A server with a limit on open files."""

    def __init__(self, files, *args, **more):
        super().__init__(*args, **more)
        self.files = files

    def start(self):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        popen = subprocess.Popen

        def popen_with_limit(*args, **more):
            limits = self.files if isinstance(self.files, tuple) else (self.files, self.files)
            set_limits = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            return popen(*args, preexec_fn=set_limits, **more)

        subprocess.Popen = popen_with_limit
        try:
            return super().start()
        finally:
            subprocess.Popen = popen

    def open_files(self):
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def threads(self):
        return len(os.listdir(f"/proc/{self.process.pid}/task"))


def model_address(model):
    return f"openai+http://127.0.0.1:{model.server_port}/v1"


def chat(server, messages, headers=None, timeout=60, **more):
    body = json.dumps({"messages": messages, **more}).encode()
    return server.call(
        "POST", "/v1/chat/completions", body, {"content-type": "application/json", **(headers or {})}, timeout=timeout
    )


def user(text):
    return [{"role": "user", "content": text}]


def test_one_shot_requests_leak_no_files_threads_or_memory(model, tmp_path):
    model.answer = "An answer."
    server = ServerWithFileLimit(256, tmp_path, "recall.mode=lexical", model=model_address(model)).start()
    try:

        def send_one_shot(n):
            status, result = chat(server, user(f"A question of its own, number {n}, that nobody asks twice."))
            assert status == 200, result

        measured = []
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            for sixth in range(6):
                list(pool.map(send_one_shot, range(sixth * ONE_SHOTS // 6, (sixth + 1) * ONE_SHOTS // 6)))
                measured.append((server.open_files(), server.threads(), server.memory() >> 20))
        print("files, threads, MiB:", measured)
        assert max(files for files, _, _ in measured) < 256
        # No growth from the second sixth to the last.
        assert measured[-1][0] <= measured[1][0] + 16 and measured[-1][1] <= measured[1][1] + 8
        assert measured[-1][2] <= measured[1][2] * 1.3 + 16
        assert server.call("GET", "/health")[0] == 200
        for n in range(20):
            status, _ = chat(server, user(f"Title {n}?"), store=False)
            assert status == 200
        assert len(server.halo("GET", "/conversations")[1]) == ONE_SHOTS
    finally:
        server.stop()


def test_stateless_requests_leave_nothing_behind(tmp_path):
    """The real model: no conversation, no thread, no open file, no file of KV cells, by all ways to ask without being stored."""
    server = Server(tmp_path).start()
    try:
        headers = {"x-halo-conversation": "none"}
        ollama = {"prompt": "Say something.", "stream": False, "options": {"num_predict": 4}}
        response = {"input": "Say something.", "store": False, "max_output_tokens": 4}

        def ask():
            # Without a limit of its own, an answer may be as long as the window.
            assert chat(server, user("Say something about tea."), store=False, max_tokens=4)[0] == 200
            assert chat(server, user("Say something about bees."), headers, max_tokens=4)[0] == 200
            assert server.call("POST", "/api/generate", ollama)[0] == 200
            assert server.call("POST", "/v1/responses", response)[0] == 200

        def left():
            process = pathlib.Path(f"/proc/{server.process.pid}")
            files = sorted(str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file())
            kv = [file for file in files if file.startswith("kv/")]
            return len(os.listdir(process / "fd")), len(os.listdir(process / "task")), kv

        ask()
        before = left()
        for _ in range(5):
            ask()
        after = left()
        # Idle threads of the pool for blocking work end after ten seconds.
        assert after[0] <= before[0] + 4 and after[1] <= before[1] + 4 and after[2] == before[2], (before, after)
        assert server.halo("GET", "/conversations")[1] == []
        assert not any(
            "Say something" in path.read_text(errors="ignore") for path in tmp_path.rglob("*") if path.is_file()
        )
    finally:
        server.stop()


def test_reading_many_conversations_leaks_no_files(model, tmp_path):
    model.answer = "An answer."
    count = ONE_SHOTS // 2
    # No model has tokenized an imported conversation yet.
    messages = [{"role": "user", "content": "Hello from elsewhere."}, {"role": "assistant", "content": "Hello."}]
    for n in range(0, count, 500):
        files = []
        for k in range(n, min(n + 500, count)):
            files.append(tmp_path / f"c{k}.json")
            files[-1].write_text(json.dumps({"messages": messages}))
        subprocess.run(
            [str(HALO), "import", "--no-index", "--data", str(tmp_path / "data"), *map(str, files)],
            check=True,
            capture_output=True,
        )
    server = ServerWithFileLimit(1024, tmp_path / "data", "recall.mode=lexical", model=model_address(model)).start()
    try:
        names = [conversation["name"] for conversation in server.halo("GET", "/conversations")[1]]
        assert len(names) == count
        started, files = time.time(), server.open_files()
        for name in names:
            assert server.halo("GET", f"/conversations/{name}")[0] == 200
        print(
            f"{count} read in {time.time() - started:.1f} s; files {files} to {server.open_files()}, {server.memory() >> 20} MiB"
        )
        assert server.open_files() <= files + 16
        # Reading created no copies.
        assert len(server.halo("GET", "/conversations")[1]) == count
    finally:
        server.stop()


def test_long_history_does_not_block_other_clients(model, tmp_path):
    model.answer = "An answer."
    server = Server(tmp_path, "recall.mode=lexical", model=model_address(model)).start()
    try:
        history = [
            {"role": "user" if n % 2 == 0 else "assistant", "content": f"a {n}"} for n in range(LONG_HISTORY + 1)
        ]
        responses = []
        sender = threading.Thread(
            target=lambda: responses.append(chat(server, history, {"x-halo-conversation": "long"}, timeout=300))
        )
        sender.start()
        waits = []
        for n in range(10):
            started = time.time()
            assert chat(server, user(f"Hello number {n}"))[0] == 200
            waits.append(time.time() - started)
            time.sleep(0.1)
        print("longest wait of the other clients:", max(waits))
        assert max(waits) < 1
        sender.join()
        assert responses[0][0] == 200, responses[0][1]
        # Too many messages are refused at once.
        status, result = chat(server, [{"role": "user", "content": "a"}] * 300_001)
        assert status == 400 and "at most" in result["error"]["message"]

        # A client that disconnects cancels its request.
        def send_and_disconnect():
            try:
                chat(
                    server,
                    [dict(m, content=m["content"] + " again") for m in history],
                    {"x-halo-conversation": "left"},
                    timeout=1,
                )
            except OSError:
                pass

        send_and_disconnect()
        # A shutdown cancels a request.
        threading.Thread(
            target=lambda: ignore_errors(
                lambda: chat(
                    server,
                    [dict(m, content=m["content"] + " more") for m in history],
                    {"x-halo-conversation": "more"},
                    timeout=60,
                )
            )
        ).start()
        time.sleep(1)
        started = time.time()
        server.stop(signal.SIGTERM)
        print("stopped after", time.time() - started)
        assert time.time() - started < 5 and server.process.returncode == 0
    finally:
        server.stop(signal.SIGKILL)


def ignore_errors(work):
    try:
        work()
    except (OSError, AssertionError):
        pass


def test_reading_takes_no_lease(model, tmp_path):
    model.answer = "An answer."
    server = Server(tmp_path, "recall.mode=lexical", model=model_address(model)).start()
    try:
        assert chat(server, user("Hello"), {"x-halo-conversation": "c"})[0] == 200
        assert server.halo("GET", "/conversations/c")[0] == 200
        pin = subprocess.run(
            [str(HALO), "pin", "--data", str(tmp_path), "-c", "c", "u0.0"], capture_output=True, text=True
        )
        assert pin.returncode == 0, pin.stderr
        assert any(chunk["pinned"] for chunk in server.halo("GET", "/conversations/c")[1]["chunks"])
        assert chat(server, user("And on"), {"x-halo-conversation": "c"})[0] == 200
    finally:
        server.stop()
