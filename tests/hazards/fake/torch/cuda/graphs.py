"""Captured graphs: nodes with the addresses they were given, and edges by streams and waits.

With FAKE_TORCH=old it is a release that cannot keep a graph.
"""

import os

GRAPHS = {}
_capturing = None


class Node:
    def __init__(self, name, pointers, kind, fields):
        # Addresses only: a graph keeps no tensor alive.
        self.pointers = [pointer.address for pointer in pointers]
        self.name, self.kind, self.fields = name, kind, fields


class RawGraph:
    def __init__(self):
        self.nodes, self.edges, self.tails = [], [], {}
        self.handle = 0x1000 * (len(GRAPHS) + 1)
        GRAPHS[self.handle] = self

    def add(self, node, stream):
        self.nodes.append(node)
        at = len(self.nodes) - 1
        self.edges += [(before, at) for before in sorted(self.tails.get(stream, ()))]
        self.tails[stream] = {at}


def launch(name, pointers, kind, fields):
    from torch.cuda import current_stream

    if _capturing is not None:
        _capturing.add(Node(name, pointers, kind, fields), current_stream().cuda_stream)


def wait(waiter, awaited):
    """The next operation on `waiter` comes after everything on `awaited`."""
    if _capturing is not None:
        _capturing.tails.setdefault(waiter, set()).update(_capturing.tails.get(awaited, ()))


class _CUDAGraph:
    def __init__(self, keep_graph=False):
        self.keep_graph, self.raw, self.instantiated = keep_graph, None, False

    def capture_begin(self, pool=None, capture_error_mode="global"):
        global _capturing
        _capturing = self.raw = RawGraph()

    def capture_end(self):
        global _capturing
        _capturing = None
        if not self.keep_graph:
            self.instantiate()
            self.raw = None

    def instantiate(self):
        self.instantiated = True

    def raw_cuda_graph(self):
        if self.raw is None:
            raise RuntimeError("the graph was not kept")
        return self.raw.handle


class _OldCUDAGraph:
    def __init__(self):
        self.instantiated = False

    def capture_begin(self, pool=None):
        global _capturing
        _capturing = RawGraph()

    def capture_end(self):
        global _capturing
        GRAPHS.pop(_capturing.handle)
        _capturing = None
        self.instantiated = True


class CUDAGraph(_OldCUDAGraph if os.environ.get("FAKE_TORCH") == "old" else _CUDAGraph):
    """The class that programs use."""


def capturing():
    return _capturing
