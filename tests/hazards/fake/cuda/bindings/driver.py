"""The driver's calls over the fake graphs; parameters lie in real memory, as the driver's do.

With FAKE_DRIVER=missing there are no bindings; with FAKE_DRIVER=breaks they fail in the middle of a capture; with
FAKE_DRIVER=early every edge is programmatic.
"""

import ctypes
import os

from torch.cuda import graphs

if os.environ.get("FAKE_DRIVER") == "missing":
    raise ImportError("no bindings here")

_nodes, _memory = {}, []
_calls = 0


def CUgraph(handle):  # noqa: N802
    return handle


def _handles(graph):
    base = graph.handle
    for at, node in enumerate(graph.nodes):
        _nodes[base + at + 1] = node
    return [base + at + 1 for at in range(len(graph.nodes))]


def cuStreamGetCaptureInfo(stream):
    graph = graphs.capturing()
    return (0, int(graph is not None), 1, graph.handle if graph else 0, [], 0)


def cuGraphGetNodes(graph, count):
    global _calls
    _calls += 1
    if os.environ.get("FAKE_DRIVER") == "breaks" and graphs.capturing() and _calls > 5:
        return (700, [], 0)
    handles = _handles(graphs.GRAPHS[graph])
    return (0, handles[:count], len(handles))


def cuGraphGetEdges(graph, count):
    raw = graphs.GRAPHS[graph]
    handles = _handles(raw)
    edges = raw.edges[:count]
    data = _Edge() if os.environ.get("FAKE_DRIVER") == "early" else None
    return (0, [handles[a] for a, _ in edges], [handles[b] for _, b in edges], [data] * len(edges), len(raw.edges))


class _Edge:
    type = 1


def cuGraphNodeGetType(handle):
    return (0, f"CUgraphNodeType.CU_GRAPH_NODE_TYPE_{_nodes[handle].kind.upper()}")


class _Parameters:
    func, kern = 0, 0
    gridDimX = gridDimY = gridDimZ = 1
    kernelParams = extra = 0


def _keep(array):
    _memory.append(array)
    return ctypes.addressof(array)


def cuGraphKernelNodeGetParams(handle):
    node, answer = _nodes[handle], _Parameters()
    answer.func = handle
    words = node.pointers
    if node.fields.get("packed"):
        buffer = (ctypes.c_uint64 * len(words))(*words)
        size = ctypes.c_size_t(8 * len(words))
        _memory.append(size)
        answer.extra = _keep((ctypes.c_void_p * 5)(1, _keep(buffer), 2, ctypes.addressof(size), 0))
    else:
        cells = [_keep(ctypes.c_uint64(word)) for word in words]
        answer.kernelParams = _keep((ctypes.c_void_p * len(cells))(*cells))
    return (0, answer)


def cuFuncGetName(function):
    return (0, _nodes[function].name.encode())


def cuFuncGetParamInfo(function, index):
    node = _nodes[function]
    if node.fields.get("packed") or index >= len(node.pointers):
        return (1, 0, 0)
    return (0, 8 * index, 8)


class _Record:
    def __init__(self, **fields):
        self.__dict__.update(fields)


def cuGraphMemsetNodeGetParams(handle):
    node = _nodes[handle]
    size = node.fields["bytes"]
    return (0, _Record(dst=node.pointers[0], pitch=0, width=size, elementSize=1, height=1))


def cuGraphMemcpyNodeGetParams(handle):
    source, destination = _nodes[handle].pointers
    zero = {f"{side}{field}": 0 for side in ("src", "dst") for field in ("Pitch", "Height", "XInBytes", "Y", "Z")}
    size = _nodes[handle].fields["bytes"]
    ends = {"srcDevice": source, "dstDevice": destination}
    return (0, _Record(**ends, **zero, WidthInBytes=size, Height=1, Depth=1))


def cuGraphChildGraphNodeGetGraph(handle):
    return (0, _nodes[handle].fields["child"])
