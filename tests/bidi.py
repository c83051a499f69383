"""A small client of WebDriver BiDi, which Firefox speaks itself: no driver program is needed."""

import base64
import json
import os
import re
import socket
import struct
import subprocess
import time


class WebSocket:
    """The client side of one connection (RFC 6455), for text messages."""

    def __init__(self, port, path):
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        key = base64.b64encode(os.urandom(16)).decode()
        lines = [
            f"GET {path} HTTP/1.1",
            f"Host: 127.0.0.1:{port}",
            "Upgrade: websocket",
            "Connection: Upgrade",
            f"Sec-WebSocket-Key: {key}",
            "Sec-WebSocket-Version: 13",
        ]
        self.socket.sendall("\r\n".join([*lines, "", ""]).encode())
        head = b""
        while b"\r\n\r\n" not in head:
            head += self.read(1)
        assert b" 101 " in head.split(b"\r\n")[0], head

    def read(self, count):
        data = b""
        while len(data) < count:
            part = self.socket.recv(count - len(data))
            assert part, "the browser has closed the connection"
            data += part
        return data

    def send(self, text):
        data = text.encode()
        size = len(data)
        header = struct.pack("!BB", 0x81, 0x80 | size) if size < 126 else b""
        if 126 <= size < 65536:
            header = struct.pack("!BBH", 0x81, 0x80 | 126, size)
        elif size >= 65536:
            header = struct.pack("!BBQ", 0x81, 0x80 | 127, size)
        mask = os.urandom(4)
        self.socket.sendall(header + mask + bytes(byte ^ mask[n % 4] for n, byte in enumerate(data)))

    def receive(self):
        message = b""
        while True:
            first, second = self.read(2)
            size = second & 0x7F
            if size == 126:
                size = struct.unpack("!H", self.read(2))[0]
            elif size == 127:
                size = struct.unpack("!Q", self.read(8))[0]
            data = self.read(size)
            if first & 0x0F in (0, 1):
                message += data
                if first & 0x80:
                    return message.decode()


class Firefox:
    """A headless Firefox with one window."""

    def __init__(self, program, profile):
        command = [program, "--headless", "--no-remote", "--profile", str(profile), "--remote-debugging-port=0"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        port = None
        for line in self.process.stderr:
            match = re.search(r"WebDriver BiDi listening on ws://127\.0\.0\.1:(\d+)", line)
            if match:
                port = int(match[1])
                break
        assert port, "Firefox did not start"
        self.socket = WebSocket(port, "/session")
        self.last = 0
        self.errors = []
        self.command("session.new", {"capabilities": {}})
        self.command("session.subscribe", {"events": ["log.entryAdded"]})
        self.window = self.command("browsingContext.getTree", {})["contexts"][0]["context"]

    def command(self, method, params):
        self.last += 1
        self.socket.send(json.dumps({"id": self.last, "method": method, "params": params}))
        while True:
            message = json.loads(self.socket.receive())
            if message.get("method") == "log.entryAdded" and message["params"]["level"] == "error":
                self.errors.append(message["params"].get("text"))
            if message.get("id") == self.last:
                assert message["type"] == "success", message
                return message["result"]

    def open(self, url):
        self.command("browsingContext.navigate", {"context": self.window, "url": url, "wait": "complete"})

    def evaluate(self, expression):
        """The value of an expression of JSON."""
        params = {
            "expression": f"(async () => JSON.stringify(await ({expression})) ?? 'null')()",
            "target": {"context": self.window},
            "awaitPromise": True,
        }
        result = self.command("script.evaluate", params)
        assert result["type"] == "success", result
        return json.loads(result["result"]["value"])

    def wait_for(self, expression, seconds=30):
        deadline = time.time() + seconds
        while time.time() < deadline:
            value = self.evaluate(expression)
            if value:
                return value
            time.sleep(0.1)
        raise AssertionError(f"it did not happen: {expression}")

    def type(self, text):
        """Types into the element that has the focus. `\ue007` is Enter."""
        keys = [{"type": kind, "value": key} for key in text for kind in ("keyDown", "keyUp")]
        actions = [{"type": "key", "id": "keyboard", "actions": keys}]
        self.command("input.performActions", {"context": self.window, "actions": actions})

    def resize(self, width, height):
        self.command(
            "browsingContext.setViewport", {"context": self.window, "viewport": {"width": width, "height": height}}
        )

    def screenshot(self, path):
        shot = self.command("browsingContext.captureScreenshot", {"context": self.window})
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self):
        self.process.terminate()
        self.process.wait(30)
