"""A decode layer with three streams, in PyTorch on a GPU: captured with and without mistakes, and measured.

Arguments: a folder for captures and `expectations.json`. For every variant and batch size it captures a graph, writes
the capture, replays it on fresh inputs and counts the steps whose state differs from a single-stream eager reference.
With `--plain` it only captures (one graph per batch size, all in one pool), as a server that knows nothing of exports.
"""

import argparse
import json
import os
import sys
import traceback

import torch
import triton
import triton.language as tl

DEVICE = "cuda"
HIDDEN, Q_LORA, KV = 2048, 1024, 512
INDEX_HEADS, INDEX_DIM, TOP_K = 32, 128, 256
HEADS_DIM, FFN = 8192, 4096
LAYERS, KEYS = 3, 2048
BATCHES = (64, 32, 16, 8, 4, 2, 1)
STEPS = 20


@triton.jit
def index_logits(q, weight, keys, out, n, heads: tl.constexpr, dim: tl.constexpr, tile: tl.constexpr):
    row, part = tl.program_id(0), tl.program_id(1)
    s, d, h = part * tile + tl.arange(0, tile), tl.arange(0, dim), tl.arange(0, heads)
    k = tl.load(keys + (row * n + s[:, None]) * dim + d[None, :])
    x = tl.dot(k, tl.trans(tl.load(q + (row * heads + h[:, None]) * dim + d[None, :])))
    x = tl.maximum(x, 0.0) * tl.load(weight + row * heads + h)[None, :]
    tl.store(out + row * n + s, tl.sum(x, 1))


@triton.jit
def index_gate(q_lora, out, width: tl.constexpr, heads: tl.constexpr):
    row, h = tl.program_id(0), tl.arange(0, heads)
    tl.store(out + row * heads + h, tl.load(q_lora + row * width + h).to(tl.float32))


@triton.jit
def store_kv(source, cache, slots, stride, width: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, width)
    x = tl.load(source + row * stride + i).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / width + 1e-6)
    tl.store(cache + tl.load(slots + row) * width + i, x.to(tl.bfloat16))


@triton.jit
def quantise(source, out, scale, width: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, width)
    x = tl.load(source + row * width + i).to(tl.float32)
    peak = tl.maximum(tl.max(tl.abs(x), 0), 1e-4) / 127.0
    tl.store(out + row * width + i, (x / peak).to(tl.int8))
    tl.store(scale + row, peak)


# torch.topk asserts on the device when its input changes under it, as it does here by mistake: this one reads it once.
@triton.jit
def select_top(logits, out, n: tl.constexpr, k: tl.constexpr):
    row, s = tl.program_id(0), tl.arange(0, n)
    bits = tl.load(logits + row * n + s).to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    ranked = tl.sort((order << 32) | s.to(tl.int64), descending=True)
    tl.store(out + row * k + s, ranked & 0xFFFFFFFF, mask=s < k)


class Weights:
    def __init__(self, batch):
        generator = torch.Generator(device=DEVICE).manual_seed(1)

        def random(*shape):
            return [
                (0.02 * torch.randn(*shape, device=DEVICE, generator=generator)).bfloat16() for _ in range(LAYERS)
            ]

        self.qkv, self.q_index = random(HIDDEN, Q_LORA + KV), random(Q_LORA, INDEX_HEADS * INDEX_DIM)
        self.q, self.o = random(Q_LORA, HEADS_DIM), random(HEADS_DIM, HIDDEN)
        self.up, self.down = random(HIDDEN, FFN), random(FFN, HIDDEN)
        self.keys = [50 * k for k in random(batch, KEYS, INDEX_DIM)]
        self.slots = torch.arange(batch, device=DEVICE)


class Variant:
    """What the program does about lifetimes and order."""

    def __init__(self, name, overlap=True, hold=False, record=False, persistent=False, wait=True):
        self.name, self.overlap, self.hold, self.record = name, overlap, hold, record
        self.persistent, self.wait = persistent, wait


VARIANTS = (
    (Variant("mistakes"), [["index_logits", ""], ["store_kv", ""]]),
    (Variant("persistent-logits", persistent=True), [["store_kv", ""]]),
    (Variant("missing-wait", hold=True, wait=False), [["layer_norm", "index_gate"]]),
    (Variant("hold", hold=True), []),
    (Variant("record-stream", record=True), []),
    (Variant("overlap-off", overlap=False), []),
)
REFERENCE = Variant("reference", overlap=False, hold=True)


def step(w, x, caches, variant, side, logits_buffer):
    main = torch.cuda.current_stream()
    kv_stream, index_stream = side if variant.overlap else (main, main)
    chosen = []
    for layer in range(LAYERS):
        batch = x.shape[0]
        h = torch.nn.functional.rms_norm(x, (HIDDEN,))
        kv_stream.wait_stream(main)
        index_stream.wait_stream(main)
        qkv = h @ w.qkv[layer]
        produced = torch.cuda.Event()
        produced.record(main)
        q_lora = torch.nn.functional.rms_norm(qkv[:, :Q_LORA], (Q_LORA,))
        normed = torch.cuda.Event()
        normed.record(main)
        fresh = None if variant.persistent else torch.empty(batch, KEYS, device=DEVICE, dtype=torch.float32)
        logits = logits_buffer if variant.persistent else fresh
        with torch.cuda.stream(index_stream):
            if variant.wait:
                index_stream.wait_event(normed)
            gate = torch.empty(batch, INDEX_HEADS, device=DEVICE, dtype=torch.float32)
            index_gate[(batch,)](q_lora, gate, Q_LORA, INDEX_HEADS)
            q_index = q_lora @ w.q_index[layer]
            index_logits[(batch, KEYS // 64)](q_index, gate, w.keys[layer], logits, KEYS, INDEX_HEADS, INDEX_DIM, 64)
            top = torch.empty(batch, TOP_K, device=DEVICE, dtype=torch.int64)
            select_top[(batch,)](logits, top, KEYS, TOP_K)
            chosen.append(top)
        with torch.cuda.stream(kv_stream):
            kv_stream.wait_event(produced)
            store_kv[(batch,)](qkv[:, Q_LORA:], caches[layer], w.slots, qkv.stride(0), KV)
        if variant.record:
            qkv.record_stream(kv_stream)
            fresh.record_stream(index_stream)
        held = (qkv, logits) if variant.hold else None
        del qkv, logits, fresh
        narrow = torch.empty(batch, Q_LORA, device=DEVICE, dtype=torch.int8)
        scale = torch.zeros(batch, 1, device=DEVICE, dtype=torch.float32)
        quantise[(batch,)](q_lora, narrow, scale, Q_LORA)
        q = (narrow.float() * scale).bfloat16() @ w.q[layer]
        dense = torch.empty_like(x)
        dense.copy_((h @ w.up[layer]) @ w.down[layer])
        main.wait_stream(kv_stream)
        main.wait_stream(index_stream)
        del held
        x = torch.nn.functional.rms_norm(x + q @ w.o[layer] + dense, (HIDDEN,))
    return x, chosen


class Program:
    # Once: the streams come from a small pool, and one that the capture's own stream has too would be no side stream.
    side = None

    def __init__(self, batch, variant):
        self.w, self.variant = Weights(batch), variant
        Program.side = Program.side or (torch.cuda.Stream(), torch.cuda.Stream())
        self.caches = [torch.zeros(batch, KV, device=DEVICE, dtype=torch.bfloat16) for _ in range(LAYERS)]
        self.x = torch.randn(batch, HIDDEN, device=DEVICE).bfloat16()
        self.logits = torch.empty(batch, KEYS, device=DEVICE, dtype=torch.float32)
        for _ in range(2):
            self.run(variant, self.caches)
        torch.cuda.synchronize()

    def run(self, variant, caches):
        return step(self.w, self.x, caches, variant, self.side, self.logits)

    def capture(self, pool=None):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            self.out = self.run(self.variant, self.caches)
        return graph

    def wrong_steps(self, graph):
        """Share of replays whose state differs from the reference's."""
        expected = [torch.zeros_like(c) for c in self.caches]
        wrong = 0
        for _ in range(STEPS):
            self.x.copy_(torch.randn_like(self.x))
            for cache in self.caches:
                cache.zero_()
            torch.cuda.synchronize()
            graph.replay()
            torch.cuda.synchronize()
            got = [self.out[0].clone(), *(c.sort(-1).values for c in self.out[1]), *(c.clone() for c in self.caches)]
            x, chosen = self.run(REFERENCE, expected)
            torch.cuda.synchronize()
            want = [x, *(c.sort(-1).values for c in chosen), *expected]
            wrong += any(not torch.equal(a, b) for a, b in zip(got, want))
        return wrong / STEPS


def measured(folder, only):
    from toolstorm_capture import toolstorm_capture

    expectations = []
    for variant, pairs in VARIANTS:
        for batch in BATCHES:
            for marks in ("both", "dispatch", "calls") if batch in only else ("both",):
                name = f"{variant.name}-b{batch}" + ("" if marks == "both" else f"-{marks}")
                record = {"file": f"{name}.json", "variant": variant.name, "batch": batch, "pairs": pairs}
                try:
                    program = Program(batch, variant)
                    # The first capture of a program may make what lasts.
                    program.capture()
                    with toolstorm_capture(os.path.join(folder, record["file"]), marks=marks):
                        graph = program.capture()
                    record["wrong_steps"] = program.wrong_steps(graph)
                    with open(os.path.join(folder, record["file"]), encoding="utf-8") as file:
                        exported = layout(json.load(file)["allocations"])
                    # The generator's state is allocated in a capture only while no other graph is alive.
                    del graph
                    plain = layout(recorded(program.capture))
                    record["layout_as_without_exporter"] = exported == plain
                    record["layout_differs"] = next(([a, b] for a, b in zip(exported, plain) if a != b), None)
                    del program
                except Exception:
                    record["error"] = traceback.format_exc()
                torch.cuda.empty_cache()
                print(json.dumps(record), flush=True)
                expectations.append(record)
    with open(os.path.join(folder, "expectations.json"), "w", encoding="utf-8") as file:
        json.dump({"device": torch.cuda.get_device_name(0), "torch": torch.__version__, "cases": expectations}, file)


def recorded(action):
    """What the allocator did meanwhile."""
    torch.cuda.memory._record_memory_history(max_entries=100_000, stacks="python")
    try:
        start = len(torch.cuda.memory._snapshot()["device_traces"][0])
        action()
        return torch.cuda.memory._snapshot()["device_traces"][0][start:]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def layout(events):
    """Allocations and frees in the segments that were made meanwhile, with their places there."""
    segments, found = [], []
    for event in events:
        if event["action"] == "segment_alloc":
            segments.append((event["addr"], event["size"]))
        if event["action"] in ("alloc", "free_requested"):
            places = [(n, event["addr"] - at) for n, (at, size) in enumerate(segments) if at <= event["addr"] < at + size]
            found += [(event["action"], event["size"], place) for place in places[:1]]
    # What is freed after the capture has ended is none of it.
    while found and found[-1][0] != "alloc":
        found.pop()
    return found


def plain():
    """A server's capture loop: largest batch first, one pool, references kept by mistake nowhere."""
    variant = VARIANTS[0][0]
    pool, kept = torch.cuda.graph_pool_handle(), []
    for bs in BATCHES:
        program = Program(bs, variant)
        kept.append((program, program.capture(pool)))
    for program, graph in kept:
        graph.replay()
    torch.cuda.synchronize()
    print("captured and replayed", len(kept), "graphs", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--plain", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    print(torch.__version__, torch.cuda.get_device_name(0), file=sys.stderr, flush=True)
    if options.plain:
        plain()
    else:
        os.makedirs(options.folder, exist_ok=True)
        measured(options.folder, only=(8,))


if __name__ == "__main__":
    main()
