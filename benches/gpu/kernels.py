"""Index logits and top-k on one GPU: our kernels against a tuned Triton kernel, torch.topk and the card's own ceilings.

Every figure is a median over repeated launches with a cold L2 (`triton.testing.do_bench`), ceilings measured in the same
process. Each shape is checked against a float64 reference on fresh random inputs with poisoned outputs first.
Usage: kernels.py OUTPUT.json
"""
import ctypes
import itertools
import json
import os
import re
import sys
import traceback

import torch
import triton
import triton.language as tl

from launch import KERNELS, Module, tensor_map

HEADS, DIMS, PAGE = 64, 128, 64
# As in `src/device/cuda/launch.rs`.
STAGES, CONSUMERS, FEW_PAGES, STREAM_BLOCKS, STREAM_SPAN = (8, 16), 4, (16384, 4096), 4, 32
DEVICE = "cuda"
SMS = torch.cuda.get_device_properties(0).multi_processor_count


@triton.jit
def triton_logits(q, w, k, table, lengths, out, table_stride, out_stride, H: tl.constexpr, D: tl.constexpr,
                  P: tl.constexpr, PAGES: tl.constexpr):
    row = tl.program_id(0)
    part = tl.program_id(1)
    n = tl.load(lengths + row)
    h = tl.arange(0, H)
    d = tl.arange(0, D)
    s = tl.arange(0, P)
    if part * PAGES * P < n:
        queries = tl.trans(tl.load(q + row * H * D + h[:, None] * D + d[None, :]))
        weights = tl.load(w + row * H + h)
        for i in range(PAGES):
            page = part * PAGES + i
            if page * P < n:
                at = tl.load(table + row * table_stride + page).to(tl.int64)
                keys = tl.load(k + at * P * D + s[:, None] * D + d[None, :])
                x = tl.maximum(tl.dot(keys, queries), 0.0) * weights[None, :]
                tl.store(out + row * out_stride + page * P + s, tl.sum(x, 1), mask=page * P + s < n)


def bench(call, rep=20):
    quantiles = triton.testing.do_bench(call, warmup=5, rep=rep, quantiles=[0.5, 0.1, 0.9])
    return [q * 1000 for q in quantiles]


def bench_graph(call, repeats=20):
    """Microseconds a launch inside one graph of `repeats` launches: no launch gaps, warm L2."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()
    return [x / repeats for x in bench(graph.replay)]


def defined(file, name):
    """A number that a kernel's source defines, the first where there are several."""
    with open(os.path.join(KERNELS, file), encoding="utf-8") as source:
        return int(re.search(rf"#define {name} (\d+)", source.read()).group(1))


def ceilings():
    a = torch.empty(1 << 31, dtype=torch.uint8, device=DEVICE).random_()
    b = torch.empty_like(a)
    copy = 2 * a.numel() / bench(lambda: b.copy_(a))[0] / 1e3
    del a, b
    x = torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16)
    y = torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16)
    product = 2 * 8192**3 / bench(lambda: x @ y)[0] / 1e6
    one = torch.ones((), device=DEVICE)
    x8, y8 = x.to(torch.float8_e4m3fn), y.to(torch.float8_e4m3fn).t()
    eight = 2 * 8192**3 / bench(lambda: torch._scaled_mm(x8, y8, one, one, out_dtype=torch.bfloat16))[0] / 1e6
    return {"copy_gb_s": copy, "bf16_tflop_s": product, "e4m3_tflop_s": eight}


class Case:
    """One batch over paged keys, in both precisions."""

    def __init__(self, context, rows, e4m3, ragged=False):
        self.rows, self.n, self.e4m3, self.groups = rows, context // 4, e4m3, HEADS // 8
        self.row_pages = (self.n + PAGE - 1) // PAGE
        pages = rows * self.row_pages
        self.lengths = torch.full((rows,), self.n, device=DEVICE, dtype=torch.int32)
        if ragged:
            self.lengths = torch.randint(0, self.n + 1, (rows,), device=DEVICE, dtype=torch.int32)
        self.positions = self.lengths - 1
        self.table = torch.randperm(pages, device=DEVICE).to(torch.int32).view(rows, self.row_pages)
        self.weights = torch.randn(rows, HEADS, device=DEVICE)
        self.out = torch.full((rows, self.row_pages * PAGE), float("nan"), device=DEVICE)
        if e4m3:
            self.pages = torch.empty(pages, PAGE * DIMS + PAGE * 4, device=DEVICE, dtype=torch.uint8)
            for start in range(0, pages, 65536):
                part = self.pages[start:start + 65536]
                keys = torch.randn(part.shape[0], PAGE * DIMS, device=DEVICE).to(torch.float8_e4m3fn)
                part[:, :PAGE * DIMS] = keys.view(torch.uint8)
                part[:, PAGE * DIMS:] = (torch.rand(part.shape[0], PAGE, device=DEVICE) + 0.5).view(torch.uint8)
            self.queries = torch.randn(rows, HEADS, DIMS, device=DEVICE).to(torch.float8_e4m3fn)
            self.maps = (
                tensor_map(self.pages, "u8", [DIMS, PAGE, pages], [DIMS, PAGE * DIMS + PAGE * 4], [DIMS, PAGE, 1]),
                tensor_map(self.queries, "u8", [DIMS, HEADS, rows], [DIMS, HEADS * DIMS], [DIMS, HEADS, 1]))
        else:
            self.pages = torch.empty(pages, PAGE, DIMS, device=DEVICE, dtype=torch.bfloat16).normal_()
            self.queries = torch.randn(rows, HEADS, DIMS, device=DEVICE, dtype=torch.bfloat16)
            self.maps = (
                tensor_map(self.pages, "bf16", [DIMS, pages * PAGE, 1], [DIMS * 2, pages * PAGE * DIMS * 2], [64, PAGE, 1]),
                tensor_map(self.queries, "bf16", [DIMS, HEADS, rows], [DIMS * 2, HEADS * DIMS * 2], [64, HEADS, 1]))
        self.bytes = int(self.lengths.sum()) * ((DIMS + 4 if e4m3 else 2 * DIMS) + 4)
        self.flops = int(self.lengths.sum()) * HEADS * DIMS * 2

    def paged(self, kernel):
        kernel(SMS, *self.maps, self.pages, self.weights, HEADS, self.groups, self.positions, 0, self.table, self.row_pages,
               self.out, self.out.shape[1], self.rows)

    def stream(self, kernel, span):
        parts = max(1, -(-self.row_pages // span))
        span = max(1, -(-self.row_pages // parts))
        kernel((self.rows, parts), self.positions, self.table, self.queries, self.pages, self.row_pages,
               self.queries[0].nbytes, 0, span, self.weights, self.out, HEADS, self.out.shape[1], self.groups)

    def span(self):
        """Pages a streaming block: the fewest with which all blocks run at once."""
        most = STREAM_BLOCKS * SMS
        return next((s for s in range(1, STREAM_SPAN) if self.rows * -(-self.row_pages // s) <= most), STREAM_SPAN)

    def reader(self):
        """The reader that the engine launches for this shape."""
        if self.rows * self.row_pages > FEW_PAGES[self.e4m3]:
            return "paged"
        return "page" if self.span() == 1 else "stream"

    def direct(self, kernel, pages_a_block, width=0):
        part = (self.row_pages + pages_a_block - 1) // pages_a_block
        kernel((part, self.rows), self.pages, self.queries, ctypes.c_uint64(self.queries[0].nbytes), self.weights, HEADS,
               self.groups, self.positions, 0, self.table, self.row_pages, self.out, self.out.shape[1], pages_a_block, width)

    def triton(self, config):
        pages, warps, stages = config
        triton_logits[(self.rows, triton.cdiv(self.row_pages, pages))](
            self.queries, self.weights, self.pages, self.table, self.lengths, self.out, self.row_pages,
            self.out.shape[1], HEADS, DIMS, PAGE, pages, num_warps=warps, num_stages=stages)

    def ballast(self, groups):
        """Only the first groups of heads are live: what the others hold must not matter."""
        self.groups, dead = groups, slice(groups * 8, HEADS)
        self.queries.view(torch.uint8 if self.e4m3 else torch.int16)[:, dead] = 0x7f if self.e4m3 else 0x7fc0
        self.weights[:, dead] = float("nan")

    def reference(self, row):
        n, live = int(self.lengths[row]), self.groups * 8
        pages = self.pages[self.table[row].long()]
        if self.e4m3:
            keys = pages[:, :PAGE * DIMS].contiguous().view(torch.float8_e4m3fn).view(-1, DIMS).double()
            scale = pages[:, PAGE * DIMS:].contiguous().view(torch.float32).reshape(-1).double()
        else:
            keys, scale = pages.reshape(-1, DIMS).double(), 1.0
        product = (keys @ self.queries[row, :live].double().t()).clamp(min=0) @ self.weights[row, :live].double()
        return (product * scale)[:n]

    def check(self):
        """The largest relative error over some rows; every other output must still be poisoned."""
        worst = 0.0
        for row in sorted({0, self.rows // 2, self.rows - 1}):
            n = int(self.lengths[row])
            assert torch.isnan(self.out[row, n:]).all(), f"row {row}: wrote past its length"
            if n:
                reference, got = self.reference(row), self.out[row, :n].double()
                worst = max(worst, float((got - reference).norm() / reference.norm()))
                assert worst < 3e-3, f"row {row}: relative error {worst}"
        return worst


def tune(case, configs):
    """The fastest configuration of the Triton kernel for this shape."""
    best = None
    for config in configs:
        try:
            time = bench(lambda: case.triton(config), 5)
        except Exception:
            continue
        if best is None or time[0] < best[0][0]:
            best = (time, config)
    return best


def shared_bytes(e4m3):
    stages = STAGES[e4m3]
    tile = PAGE * DIMS * (1 if e4m3 else 2)
    return stages * (tile + (PAGE * 4 if e4m3 else 0)) + 2 * tile + (2 * stages + 4) * 8 + 1024 + 2049 * 4 + 64


def rotate(cases, call):
    """A graph's launches walk over several inputs, more bytes than L2 holds where memory allows: a steady stream."""
    state = {"at": 0}

    def step():
        call(cases[state["at"] % len(cases)])
        state["at"] += 1
    return step


def logits(report):
    module = Module("logits.cu")
    names = ("bf16", "e4m3")
    pair = [module.kernel(f"direct_mqa_logits_{name}", 128) for name in names]
    calls = {reader: [] for reader in ("page", "stream", "paged", "direct")}
    for e4m3, name in enumerate(names):
        page = module.kernel(f"page_mqa_logits_{name}", 128)
        stream = module.kernel(f"stream_mqa_logits_{name}", 128)
        paged = module.kernel(f"paged_mqa_logits_{name}", (128 + 32) * CONSUMERS, shared_bytes(e4m3))
        calls["page"].append(lambda case, k=page: case.stream(k, 1))
        calls["stream"].append(lambda case, k=stream: case.stream(k, case.span()))
        calls["paged"].append(lambda case, k=paged: case.paged(k))
        calls["direct"].append(lambda case, k=pair[e4m3]: case.direct(k, 1))
    for e4m3 in (False, True):
        for rows, context, groups in ((1, 4, 8), (3, 1024, 8), (7, 5000, 3), (64, 9000, 8), (5, 40000, 1), (128, 33333, 8)):
            for reader in calls:
                case = Case(context, rows, e4m3, ragged=True)
                if groups < 8:
                    case.ballast(groups)
                calls[reader][e4m3](case)
                torch.cuda.synchronize()
                case.check()
            case.direct(pair[e4m3], 3, case.n)
            for row in range(rows):
                assert torch.isneginf(case.out[row, int(case.lengths[row]):case.n]).all(), "the plain reader fills up"
    print("ragged checks passed", flush=True)
    configs = [(p, w, s) for p in (1, 2, 4, 8, 16) for w in (4, 8) for s in (2, 3, 4) if p < 16 or w == 4]
    ceiling = report["ceilings"]["copy_gb_s"]
    for context in (4096, 8192, 32768, 131072, 524288):
        for rows in (1, 8, 32, 64, 128):
            for e4m3 in (False, True):
                case = Case(context, rows, e4m3)
                # At most 24 inputs of at least 300 MB together.
                copies = min(24, max(1, int(300e6 / case.bytes) + 1))
                cases = [case] + [Case(context, rows, e4m3) for _ in range(copies - 1)]
                line = {"context": context, "rows": rows, "e4m3": e4m3, "bytes": case.bytes, "flops": case.flops,
                        "inputs": copies, "ours": {}}
                # The engine's choice, and its neighbours beside it.
                chosen, pages = case.reader(), rows * case.row_pages
                nearby = {"page": pages <= 1024, "stream": 256 <= pages <= 65536, "paged": pages >= 2048}
                for reader in [r for r in calls if r == chosen or nearby.get(r)]:
                    call = calls[reader][e4m3]
                    case.out.fill_(float("nan"))
                    call(case)
                    torch.cuda.synchronize()
                    line["error"] = case.check()
                    line["ours"][reader] = {"cold": bench(lambda: call(case), 10),
                                            "steady": bench_graph(rotate(cases, call), max(copies, 12))}
                line["reader"] = chosen
                if not e4m3:
                    tuned, config = tune(case, configs)
                    steady = bench_graph(rotate(cases, lambda c: c.triton(config)), max(copies, 12))
                    line["triton"] = {"config": config, "cold": tuned, "steady": steady}
                report["logits"].append(line)
                text = f"ctx {context:6} B {rows:3} {'e4m3' if e4m3 else 'bf16'}"
                for kind in ("cold", "steady"):
                    time = line["ours"][chosen][kind][0]
                    rate = case.bytes / time / 1e3
                    text += f" | {kind} {time:6.1f} us {rate:4.0f} GB/s {rate / ceiling:4.0%} {chosen:6}"
                    if not e4m3:
                        text += f" x{line['triton'][kind][0] / time:.2f}"
                print(text + f" {case.flops / time / 1e6:.0f} TF", flush=True)
                del case, cases


def topk(report):
    module = Module("topk.cu")
    threads, capacity, group, deep = (defined("topk.cu", name) for name in ("THREADS", "CAPACITY", "GROUP", "DEEP"))
    shared = capacity * 8 + group * deep * threads * 16
    selects = {c: module.kernel(f"topk_select_{c}", threads, shared) for c in (1, 2, 4, 8)}
    k = 512

    def data(kind, rows, n):
        if kind == "normal":
            return torch.randn(rows, n, device=DEVICE)
        if kind == "zeros":
            return torch.zeros(rows, n, device=DEVICE)
        if kind == "sparse":
            x = torch.randn(rows, n, device=DEVICE)
            return torch.where(torch.rand(rows, n, device=DEVICE) < 0.001, x.abs(), torch.zeros_like(x))
        if kind == "rising":
            return torch.arange(n, device=DEVICE, dtype=torch.float32).expand(rows, n).contiguous()
        if kind == "spike":
            x = torch.randn(rows, n, device=DEVICE)
            x[:, : n // 64] += 30
            return x
        if kind == "recent":
            x = torch.randn(rows, n, device=DEVICE)
            x[:, -600:] += 30
            return x
        if kind == "flat":
            return 1 + 1e-6 * torch.randn(rows, n, device=DEVICE)
        return torch.randint(-3, 4, (rows, n), device=DEVICE).float()

    def expected(values, n, k):
        """Indices of the largest by (value, later index), latest first."""
        flipped = values[:n].flip(0)
        order = torch.sort(flipped, descending=True, stable=True).indices[:min(k, n)]
        return n - 1 - order.sort().values

    shapes = ((3, 100), (2, 513), (4, 4096), (3, 4097), (5, 8191), (3, 20000), (9, 32768), (64, 131072), (2, 262144))
    for rows, n in shapes:
        for kind in ("normal", "zeros", "sparse", "rising", "spike", "recent", "flat", "ties"):
            x = data(kind, rows, (n + 3) // 4 * 4)
            lengths = torch.full((rows,), n, device=DEVICE, dtype=torch.int32)
            lengths[0] = max(n // 2, 1)
            for (cluster, select), few in itertools.product(selects.items(), (1, 64, k)):
                out = torch.full((rows, 2050), -7, device=DEVICE, dtype=torch.int32)
                select(rows * cluster, x, x.shape[1], lengths - 1, 0, few, out, 2050)
                torch.cuda.synchronize()
                for row in {0, rows - 1}:
                    want = expected(x[row], int(lengths[row]), few)
                    words = torch.full((2050,), -1, device=DEVICE, dtype=torch.int32)
                    words[0], words[1] = len(want), few
                    words[2:2 + 2 * len(want):2] = want
                    words[3:3 + 2 * len(want):2] = x[row, want].view(torch.int32)
                    assert torch.equal(out[row], words), (kind, rows, n, few, cluster, row)
    print("top-k checks passed", flush=True)
    for rows in (1, 8, 32, 64, 128):
        for n in (2048, 32768, 131072):
            x = torch.randn(rows, n, device=DEVICE)
            lengths = torch.full((rows,), n - 1, device=DEVICE, dtype=torch.int32)
            out = torch.zeros((rows, 2050), device=DEVICE, dtype=torch.int32)
            times = {c: bench(lambda: s(rows * c, x, n, lengths, 0, k, out, 2050)) for c, s in selects.items()}
            cluster = min(times, key=lambda c: times[c][0])
            line = {"rows": rows, "n": n, "us": times[cluster], "cluster": cluster,
                    "by_cluster": {c: t[0] for c, t in times.items()}, 
                    "read_us": bench(lambda: x.amax(dim=1)), "torch_us": bench(lambda: torch.topk(x, min(k, n), dim=1))}
            floor = rows * n * 4 / report["ceilings"]["copy_gb_s"] / 1e3
            line["floor_us"] = floor
            sparse = data("sparse", rows, n)
            line["sparse_us"] = bench(lambda: selects[cluster](rows * cluster, sparse, n, lengths, 0, k, out, 2050))
            line["steady_us"] = bench_graph(lambda: selects[cluster](rows * cluster, x, n, lengths, 0, k, out, 2050))
            line["steady_sparse_us"] = bench_graph(lambda: selects[cluster](rows * cluster, sparse, n, lengths, 0, k, out, 2050))
            line["steady_read_us"] = bench_graph(lambda: x.amax(dim=1))
            report["topk"].append(line)
            print(f"top-k B {rows:3} n {n:6}: {times[cluster][0]:6.1f} us (cluster {cluster}; "
                  + ", ".join(f"{c}:{t[0]:.1f}" for c, t in times.items())
                  + f") floor {floor:.1f} amax {line['read_us'][0]:.1f} torch {line['torch_us'][0]:.1f}"
                  f" sparse {line['sparse_us'][0]:.1f} | steady {line['steady_us'][0]:.1f} sparse {line['steady_sparse_us'][0]:.1f}"
                  f" amax {line['steady_read_us'][0]:.1f}", flush=True)


def main():
    report = {"device": torch.cuda.get_device_name(0), "torch": torch.__version__, "triton": triton.__version__,
              "logits": [], "topk": [], "failures": []}
    report["ceilings"] = ceilings()
    print(report["device"], {k: round(v) for k, v in report["ceilings"].items()}, flush=True)
    print("start", flush=True)
    empty = torch.zeros(1, device=DEVICE)
    report["empty_us"] = bench(lambda: empty.zero_())
    print("one-element fill", report["empty_us"], flush=True)
    for part in (lambda: logits(report), lambda: topk(report)):
        try:
            part()
        except Exception:
            report["failures"].append(traceback.format_exc())
            print(report["failures"][-1], flush=True)
        with open(sys.argv[1], "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)
    sys.exit(1 if report["failures"] else 0)


if __name__ == "__main__":
    main()
