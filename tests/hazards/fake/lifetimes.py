"""The exporter keeps nothing alive that the program drops, and counts no event that its history does not tell of."""

import gc
import json
import sys

import torch
from torch.cuda import launch, memory
from toolstorm_capture import toolstorm_capture

folder, marks = sys.argv[1:]


class Knot:
    """Garbage that only a collection frees."""

    def __init__(self):
        self.tensor, self.itself = memory.Tensor(256), self


def capture(bs):
    outer = memory.Tensor(2048)
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()
    # Dropped in a frame that was alive when the capture began.
    address = outer.address
    del outer
    assert memory.Tensor(2048).address == address, "a variable of the capturing frame was kept alive"
    gc.collect()
    inner()
    launch("end")
    graph.capture_end()
    return bs


def inner():
    scratch = memory.Tensor(1024)
    launch("produce", scratch)
    len(())
    address = scratch.address
    del scratch
    assert memory.Tensor(1024).address == address, "a variable was kept alive past its last use"


def snapshot(take=memory._snapshot):
    """As large ones do, it makes the collector run."""
    answer = take()
    if gc.isenabled():
        gc.collect()
    return answer


memory._snapshot = snapshot
with toolstorm_capture(f"{folder}/lifetimes.json", marks=marks):
    for bs in (2, 1):
        Knot()
        capture(bs)
for file in ("lifetimes", "lifetimes-2"):
    with open(f"{folder}/{file}.json", encoding="utf-8") as text:
        document = json.load(text)
    assert document["name"] in ("bs=2", "bs=1"), document["name"]
    last, events = document["marks"][-1], [event["action"] for event in document["allocations"]]
    assert last[1:3] == [events.count("alloc"), events.count("free_requested")], (last, events)
