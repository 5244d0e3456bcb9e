"""A server in miniature: captures one graph per batch size, with the mistake or without, then serves.

Arguments: `mistake`, `hold` or `missing-wait`, and optionally a port to answer on.
"""

import os
import sys

import torch
from torch.cuda import MAIN, SIDE, graphs, launch, memory, stream


def layer(static, batch, how):
    """qkv is produced on main, read by the side stream, and dropped before the join by mistake."""
    qkv = memory.Tensor(512 * batch)
    launch("qkv_proj", static, qkv)
    if how != "missing-wait":
        graphs.wait(SIDE, MAIN)
    cache = memory.Tensor(4096)
    with stream(SIDE):
        launch("_Z5storePKfPf", qkv, cache)
    held = qkv if how == "hold" else None
    del qkv
    q = memory.Tensor(512 * batch)
    launch("fill", q, kind="memset", bytes=512 * batch)
    launch("wq_b", static, q, packed=True)
    launch("copy", q, static, kind="memcpy", bytes=512)
    graphs.wait(MAIN, SIDE)
    launch("attention", q, cache, static)
    del held


def capture_one(bs, how):
    static = STATIC[bs]
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()
    layer(static, bs, how)
    layer(static, bs, how)
    graph.capture_end()
    assert graph.instantiated, "the exporter left the graph without its executable form"
    return graph


STATIC = {bs: memory.Tensor(512 * bs) for bs in (2, 1)}


def main():
    assert os.environ.get("FAKE_SITE") == "ran", "the hidden sitecustomize did not run"
    how = sys.argv[1]
    if how == "none":
        return
    if how == "fail":
        sys.exit(3)
    for bs in (2, 1):
        capture_one(bs, how)
    print("captured", flush=True)
    if len(sys.argv) > 2:
        serve(int(sys.argv[2]))


def serve(port):
    import http.server

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):  # noqa: N802
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()


main()
