"""A server for tests: answers dictated calls, and cuts some short when every variable in FAULTY_WHEN has its value.

    python faulty_server.py PORT

FAULTY_WHEN="A=1,B=1" names the condition (default: never), FAULT_RATE the share of calls that it damages. Which calls
are damaged depends on TOOLSTORM_SEED and on what was asked, not on the order in which requests arrive.
"""

import hashlib
import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

CONDITION = [pair.split("=", 1) for pair in os.environ.get("FAULTY_WHEN", "").split(",") if pair]
FAULTY = bool(CONDITION) and all(os.environ.get(name) == value for name, value in CONDITION)
RATE = float(os.environ.get("FAULT_RATE", "0.2")) if FAULTY else 0.0
SEED = os.environ.get("TOOLSTORM_SEED", "0")


def share(text):
    """A number from 0 to 1 that the seed and the text decide."""
    digest = hashlib.sha256(f"{SEED} {text}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def dictated(messages):
    """The calls of the newest turn that dictates any."""
    for message in reversed(messages):
        if message["role"] == "user":
            lines = str(message["content"]).splitlines()
            return [json.loads(line) for line in lines if line.startswith('{"name": ')]
    return []


def answer(body):
    calls = []
    for index, call in enumerate(dictated(body["messages"])):
        text = json.dumps(call["arguments"], ensure_ascii=False)
        if share(text) < RATE:
            text = text[: len(text) // 2]
        calls.append({"id": f"call_{index}", "type": "function", "function": {"name": call["name"], "arguments": text}})
    return {"role": "assistant", "content": None if calls else "yes", **({"tool_calls": calls} if calls else {})}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def reply(self, text, kind="application/json"):
        data = text.encode()
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        models = {"object": "list", "data": [{"id": "faulty", "object": "model"}]}
        self.reply(json.dumps(models if self.path == "/v1/models" else {}))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        message = answer(body)
        finish = "tool_calls" if message.get("tool_calls") else "stop"
        head = {"id": "x", "created": 0, "model": "faulty"}
        if not body.get("stream"):
            choice = {"index": 0, "message": message, "finish_reason": finish}
            self.reply(json.dumps({**head, "object": "chat.completion", "choices": [choice]}))
            return
        calls = [{"index": index, **call} for index, call in enumerate(message.get("tool_calls", []))]
        delta = {**message, **({"tool_calls": calls} if calls else {})}
        choices = [{"index": 0, "delta": delta, "finish_reason": None}, {"index": 0, "delta": {}, "finish_reason": finish}]
        chunks = [{**head, "object": "chat.completion.chunk", "choices": [choice]} for choice in choices]
        self.reply("".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n", "text/event-stream")


class Server(ThreadingHTTPServer):
    request_queue_size = 128


Server(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
