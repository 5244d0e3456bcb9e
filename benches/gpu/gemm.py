"""The engine's multiplications against cuBLASLt's matrix products of the same charged shapes, in one process.

Ours are sparse products that read one byte for each element of the charged matrix. Beside them: the fp8 product
(torch._scaled_mm, cuBLASLt; the same bytes) and the bf16 product (torch.mm; twice the bytes). Each is a graph of launches
over different matrices, larger together than L2. The output projection is charged two grouped factors of 8192 x 4096
elements, the products get one square matrix of as many bytes; the head is charged 1/64 of the vocabulary a row. fp8 wants
rows in multiples of 16 and gets them. Prints JSON lines. Usage: gemm.py [ROWS,...]
"""
import ctypes
import json
import sys

import torch

from launch import Module

DEVICE = "cuda"
LIVE = 2048
# Name, inputs, charged outputs, live outputs, kernel.
SHAPES = [
    ("wqkv_a", 4096, 1536, 1536, "matmul"),
    ("wq_b", 1024, 32768, 4096, "query_matmul"),
    ("wq_b_idx", 1024, 8192, 1024, "matmul"),
    ("weights_proj", 4096, 64, 8, "matmul"),
    ("index_compress", 4096, 512, 128, "compress"),
    ("core_compress", 4096, 2048, 256, "compress"),
    ("ffn_up", 4096, 8192, 8192, "matmul"),
    ("ffn_down", 8192, 4096, 4096, "matmul"),
    ("o_proj", 8192, 8192, 4096, "output_project"),
    ("head", 4096, 129280, 256, "head"),
]
TILE = 256 * 8 * 16
BLOCKS = 2
FLUSH = 400 << 20


class Rows(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("base", "stride", "len", "rows")]


class Weight(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("start", "column", "value", "ballast", "bytes")]
    _fields_ += [("rows", ctypes.c_uint32), ("columns", ctypes.c_uint32)]


def rows_of(tensor, length=None):
    """Rows of a matrix, or `length` bytes of each."""
    stride = tensor.stride(0) * tensor.element_size()
    return Rows(tensor.data_ptr(), stride, length or tensor.shape[1] * tensor.element_size(), tensor.shape[0])


class Ours:
    """One of the engine's multiplications with one stored value an output, as most of its weights have."""

    def __init__(self, modules, name, rows, inputs, live, size, kernel, copies):
        self.name, self.rows, self.live, self.kernel = name, rows, live, kernel
        self.function = modules["rows" if kernel == "head" else "matmul"].kernel(kernel, 256)
        # The output projection's own input is the live part of the attention's output.
        inputs = 512 if kernel == "output_project" else inputs
        self.start = torch.arange(live + 1, device=DEVICE, dtype=torch.int32)
        self.column = torch.randint(0, inputs, (live,), device=DEVICE, dtype=torch.int32)
        self.value = (torch.randint(-64, 65, (live,), device=DEVICE) / 16).float()
        self.ballast = [torch.randint(0, 255, (size,), device=DEVICE, dtype=torch.uint8) for _ in range(copies)]
        self.source = torch.randn(rows, inputs, device=DEVICE).to(torch.bfloat16)
        self.codes = torch.randn(rows, inputs, device=DEVICE).to(torch.float8_e4m3fn)
        self.scales = torch.rand(rows, max(1, inputs // 128), device=DEVICE) + 0.5
        self.target = torch.full((rows, max(live, 2)), float("nan"), device=DEVICE, dtype=torch.bfloat16)
        self.tokens = torch.full((rows, 1), -1, device=DEVICE, dtype=torch.int32)
        self.fed = torch.randn(rows, 4096, device=DEVICE).to(torch.bfloat16)
        self.positions = torch.randint(0, 1000, (rows, 1), device=DEVICE, dtype=torch.int32)
        self.pages = torch.arange(rows, device=DEVICE, dtype=torch.int32)[:, None].contiguous()
        self.ring = torch.full((rows, 8 * live), float("nan"), device=DEVICE)
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        tiles = rows if kernel == "head" else -(-live // 32) * -(-rows // 8)
        self.grid = min(max(-(-size // TILE), tiles), processors * BLOCKS)

    def __call__(self, copy):
        ballast = self.ballast[copy % len(self.ballast)]
        weight = Weight(self.start.data_ptr(), self.column.data_ptr(), self.value.data_ptr(), ballast.data_ptr(),
                        ballast.numel(), self.live, self.source.shape[1])
        target, source = rows_of(self.target), rows_of(self.source)
        arguments = {
            "matmul": (source, target),
            "query_matmul": (rows_of(self.codes), rows_of(self.scales), target),
            "compress": (source, rows_of(self.positions), rows_of(self.pages), rows_of(self.ring)),
            "output_project": (source, rows_of(self.fed), rows_of(self.fed), target),
            "head": (source, rows_of(self.tokens)),
        }[self.kernel]
        self.function(self.grid, *arguments, weight)

    def check(self):
        """Whether the outputs are those of the same products in float32, which are exact."""
        self(0)
        column = self.column.long()
        expected = self.source.float()[:, column] * self.value
        if self.kernel == "query_matmul":
            expected = (self.codes.float()[:, column] * self.scales[:, column // 128]) * self.value
        if self.kernel == "output_project":
            added = torch.cat([expected[:, :LIVE], self.fed[:, : 4096 - LIVE].float()], 1)
            expected = self.fed.float() + added
        if self.kernel == "head":
            return bool((self.tokens[:, 0] == expected.argmax(1)).all())
        if self.kernel == "compress":
            slots = (self.positions[:, 0] % 8).long()
            got = self.ring.view(self.rows, 8, self.live)[torch.arange(self.rows, device=DEVICE), slots]
            return torch.equal(got, expected)
        return torch.equal(self.target, expected.to(torch.bfloat16))


def time_of(call, copies):
    """Microseconds a launch, median of replays of a graph of launches over all copies."""
    for copy in range(copies):
        call(copy)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for copy in range(copies):
            call(copy)
    times = []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / copies)
    return sorted(times[2:])[5]


def main():
    batches = [int(part) for part in sys.argv[1].split(",")] if len(sys.argv) > 1 else [1, 8, 64]
    modules = {name: Module(name + ".cu") for name in ("matmul", "rows")}
    for name, inputs, charged, live, kernel in SHAPES:
        for rows in batches:
            outputs = charged if kernel != "head" else charged * rows // 64 // 16 * 16
            size, padded = inputs * outputs, max(16, rows)
            copies = max(4, min(48, -(-FLUSH // size)))
            line = {"op": name, "rows": rows, "inputs": inputs, "outputs": outputs, "bytes": size}
            try:
                ours = Ours(modules, name, rows, inputs, live, size, kernel, copies)
                line["right"] = ours.check()
                line["ours_us"] = time_of(ours, copies)
                del ours
                a8 = torch.randn(padded, inputs, device=DEVICE).to(torch.float8_e4m3fn)
                w8 = [torch.randint(0, 120, (outputs, inputs), device=DEVICE, dtype=torch.uint8).view(torch.float8_e4m3fn)
                      for _ in range(copies)]
                one = torch.ones((), device=DEVICE)
                line["fp8_us"] = time_of(
                    lambda copy: torch._scaled_mm(a8, w8[copy].t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16), copies)
                del w8
                a16 = torch.randn(rows, inputs, device=DEVICE, dtype=torch.bfloat16)
                w16 = [torch.randn(inputs, outputs, device=DEVICE, dtype=torch.bfloat16) for _ in range(max(2, copies // 2))]
                line["bf16_us"] = time_of(lambda copy: torch.mm(a16, w16[copy % len(w16)]), copies)
                del w16
                line["gb_s"] = [round(size * scale / line[key] / 1e3) for key, scale in
                                (("ours_us", 1), ("fp8_us", 1), ("bf16_us", 2))]
            except Exception as error:  # One shape that fails must not hide the others.
                line["error"] = repr(error)[:300]
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
