"""An OpenAI-like server in miniature, in PyTorch on a GPU: captures its decode step at start, one graph per batch size.

Arguments: a variant of `decode_layer.py` (`mistakes`, `hold`, ...), and a port. It knows nothing of exports.
"""

import http.server
import json
import sys

import torch
from decode_layer import BATCHES, VARIANTS, Program

MODEL = "decode-layer"


def capture_all(variant):
    """Largest batch first, all from one pool."""
    pool, runners = torch.cuda.graph_pool_handle(), {}
    for bs in BATCHES:
        program = Program(bs, variant)
        runners[bs] = (program, program.capture(pool))
    return runners


class Handler(http.server.BaseHTTPRequestHandler):
    runners = None

    def answer(self, status, body):
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_GET(self):  # noqa: N802
        known = {"/health": {"status": "ok"}, "/v1/models": {"object": "list", "data": [{"id": MODEL, "object": "model"}]}}
        self.answer(200 if self.path in known else 404, known.get(self.path, {"error": {"message": "not found"}}))

    def do_POST(self):  # noqa: N802
        self.rfile.read(int(self.headers["content-length"] or 0))
        program, graph = self.runners[1]
        graph.replay()
        torch.cuda.synchronize()
        token = int(program.out[1][-1][0, 0])
        message = {"role": "assistant", "content": f"entry {token}"}
        self.answer(200, {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "model": MODEL,
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        })

    def log_message(self, *_):
        pass


def main():
    name, port = sys.argv[1:]
    torch.manual_seed(0)
    Handler.runners = capture_all(next(variant for variant, _ in VARIANTS if variant.name == name))
    print(f"captured {len(Handler.runners)} graphs, answering on {port}", flush=True)
    http.server.HTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()


main()
