"""The exporter as a user calls it: around a capture, and on a graph that exists already."""

import sys

import torch
from torch.cuda import MAIN, SIDE, graphs, launch, memory, stream
from toolstorm_capture import export, toolstorm_capture


def body():
    scratch = memory.Tensor(1024)
    launch("produce", scratch)
    graphs.wait(SIDE, MAIN)
    with stream(SIDE):
        launch("use", scratch)
    del scratch
    launch("reuse", memory.Tensor(1024))
    graphs.wait(MAIN, SIDE)
    launch("join", static)


static = memory.Tensor(512)
folder, marks = sys.argv[1:]
before = dict(vars(torch.cuda.CUDAGraph))
with toolstorm_capture(f"{folder}/inside.json", marks=marks):
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        body()
        graph.capture_end()
assert dict(vars(torch.cuda.CUDAGraph)) == before, "the class is left changed"
kept = torch.cuda.CUDAGraph(keep_graph=True)
memory._record_memory_history()
kept.capture_begin()
body()
kept.capture_end()
export(kept, f"{folder}/existing.json", name="existing")
