"""Write captured CUDA graphs to files for `toolstorm hazards`.

    from toolstorm_capture import toolstorm_capture
    with toolstorm_capture("out.json"):        # every graph captured inside is written: out.json, out-2.json, ...
        with torch.cuda.graph(graph):
            ...

    from toolstorm_capture import export
    export(graph, "out.json")                  # a torch.cuda.CUDAGraph(keep_graph=True) that exists already

A file holds the graph's nodes with their raw parameter bytes, its edges, the allocator's trace with your stack frames,
and marks: node count and allocation count at the same moments, which tell which tensor a recycled address means. An
existing graph has no marks and a trace only where memory history was on; `toolstorm hazards` then says what that costs.

Nothing here allocates device memory, so the capture's addresses stay what they were. Needs torch and cuda-bindings.
Turns PyTorch's memory history on for each capture and off after it, and so ends one that you record yourself.
"""

import contextlib
import ctypes
import gc
import json
import os
import sys
import traceback

FORMAT = "toolstorm-capture/1"
HISTORY_ENTRIES = 1_000_000
FRAMES = 8
# CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC, and CUDA_ERROR_INVALID_VALUE, with which the driver ends a kernel's parameters.
PROGRAMMATIC = 1
NO_SUCH_PARAMETER = 1


def toolstorm_capture(path, marks="both"):
    """Context manager: every CUDA graph captured inside is written to `path` (then `path`-2, ...)."""
    import torch

    stem, extension = os.path.splitext(path)
    count = 0

    def target():
        nonlocal count
        count += 1
        return path if count == 1 else f"{stem}-{count}{extension}"

    return _installed(torch.cuda.CUDAGraph, target, marks)


def export(graph, path, name=None):
    """Write an existing graph, kept by `torch.cuda.CUDAGraph(keep_graph=True)`, to `path`."""
    import torch

    document = _graph(graph.raw_cuda_graph())
    device = torch.cuda.current_device()
    document["allocations"] = [_event(e) for e in _trace(device) if e["action"] in _ACTIONS]
    _write(document, path, name)


@contextlib.contextmanager
def _installed(graph_class, target, marks):
    undo = install(graph_class, target, marks, strict=True)
    try:
        yield
    finally:
        undo()


def install(graph_class, target, marks="both", strict=False, failed=None):
    """Wrap the class's capture so that each graph is written to `target()`; returns what undoes it.

    Unless `strict`, a failure of ours is told on stderr and to `failed`, and never reaches the program.
    """
    own = {name: graph_class.__dict__.get(name) for name in ("__init__", "capture_begin", "capture_end")}
    original = {name: getattr(graph_class, name) for name in own}
    # Releases of PyTorch that cannot keep a graph let us read it only while it is captured.
    keeps = hasattr(graph_class, "raw_cuda_graph")

    def guarded(action, recorder=None):
        # A graph is lost once: after its first failure nothing more is tried.
        if recorder is not None and recorder.failed:
            return None
        try:
            return action()
        except Exception:
            if recorder is not None:
                recorder.failed = True
            if strict:
                raise
            report(f"a graph is not exported: {traceback.format_exc()}", failed)
            return None

    def stop(recorder):
        try:
            recorder.stop()
        except Exception:
            if strict:
                raise
            report(f"memory history stays on: {traceback.format_exc()}")

    def __init__(self, *arguments, **options):
        if not keeps:
            original["__init__"](self, *arguments, **options)
            return
        wanted = arguments[0] if arguments else options.get("keep_graph", False)
        # `capture_end` instantiates the graph as the caller expects.
        original["__init__"](self, *arguments[1:], **{**options, "keep_graph": True})
        self._toolstorm_instantiate = not wanted

    def capture_begin(self, *arguments, **options):
        recorder = guarded(lambda: _Recorder(marks))
        begun = False
        try:
            original["capture_begin"](self, *arguments, **options)
            begun = recorder is not None and guarded(recorder.begin, recorder) is not None
        finally:
            if recorder is not None and not begun:
                stop(recorder)
        if begun:
            self._toolstorm_recorder = recorder

    def capture_end(self, *arguments, **options):
        recorder = self.__dict__.pop("_toolstorm_recorder", None)
        try:
            if recorder is not None:
                guarded(recorder.end, recorder)
                if not keeps:
                    guarded(lambda: recorder.read(int(recorder.marks.graph)), recorder)
            original["capture_end"](self, *arguments, **options)
            if recorder is not None:
                if keeps:
                    guarded(lambda: recorder.read(self.raw_cuda_graph()), recorder)
                guarded(lambda: recorder.write(target), recorder)
        finally:
            if recorder is not None:
                stop(recorder)
        if getattr(self, "_toolstorm_instantiate", False):
            self.instantiate()

    graph_class.__init__ = __init__
    graph_class.capture_begin = capture_begin
    graph_class.capture_end = capture_end

    def undo():
        for name, function in own.items():
            if function is None:
                delattr(graph_class, name)
            else:
                setattr(graph_class, name, function)

    return undo


def report(text, failed=None):
    """Say what went wrong without ever raising."""
    try:
        print(f"toolstorm: {text}", file=sys.stderr)
        if failed is not None:
            with open(failed(), "w", encoding="utf-8") as file:
                file.write(text)
    except Exception:
        pass


class _Recorder:
    """One capture: memory history, what was alive before it, marks while it runs."""

    def __init__(self, marks):
        import torch

        self.torch = torch
        self.device = torch.cuda.current_device()
        self.name, self.process = _bucket(), _process(torch)
        self.entered, self.document, self.failed = contextlib.ExitStack(), None, False
        # Last, so that nothing leaves it on when a part of the exporter is missing.
        self.stop()
        torch.cuda.memory._record_memory_history(max_entries=HISTORY_ENTRIES, stacks="python")
        try:
            # The counters' zero and the history's start are one moment: nothing may be freed between.
            with _uncollected():
                snapshot = torch.cuda.memory._snapshot()
                self.marks = _Marks(torch, self.device)
            self.watches = [make(self.marks) for make in _WATCHES[marks]]
            self.live = _live(snapshot, self.device)
            self.start = len(snapshot["device_traces"][self.device])
        except BaseException:
            self.stop()
            raise

    def begin(self):
        try:
            self.marks.begin()
            for watch in self.watches:
                self.entered.enter_context(watch)
        except BaseException:
            self.entered.close()
            raise
        return self

    def end(self):
        self.entered.close()
        self.marks.mark()

    def read(self, handle):
        self.document = _graph(handle)

    def stop(self):
        # A history that goes on would slow every later allocation of the program down.
        self.torch.cuda.memory._record_memory_history(enabled=None)

    def write(self, target):
        trace = _trace(self.device)
        if self.marks.broken:
            raise RuntimeError(f"marks could not be taken: {self.marks.broken}")
        document = self.document
        document["marks"] = self.marks.marks
        document["stacks"] = self.marks.stacks
        document["live"] = self.live
        document["process"] = self.process
        document["allocations"] = [_event(e) for e in trace[self.start:] if e["action"] in _ACTIONS]
        self._compare(document["allocations"])
        if len(trace) >= HISTORY_ENTRIES:
            document["warnings"].append("the allocator's history overflowed: early events are missing")
        _write(document, target(), self.name)

    def _compare(self, events):
        """Marks and history tell of the same events, or no lifetime is what it seems."""
        for place, action in ((1, "alloc"), (2, "free_requested")):
            counted, told = self.marks.marks[-1][place], sum(e["action"] == action for e in events)
            if told < counted:
                raise RuntimeError(f"the allocator counted {counted} events ({action}), its history tells of {told}")


@contextlib.contextmanager
def _uncollected():
    """No garbage is collected inside."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Marks:
    """Counts graph nodes and allocator events at the same moments.

    It runs inside the program's operations, so nothing here may raise: the first failure is kept and ends the marks.
    """

    def __init__(self, torch, device):
        self.torch, self.device, self.cu = torch, device, _driver()
        self.graph, self.marks, self.stacks, self.known = None, [], [], {}
        self.allocated, self.freed = self._counts()
        self.busy, self.broken = False, None

    def begin(self):
        stream = self.torch.cuda.current_stream(self.device).cuda_stream
        self.graph = _checked(self.cu.cuStreamGetCaptureInfo(stream))[2]
        self._mark()

    def _counts(self):
        stats = self.torch.cuda.memory_stats_as_nested_dict(self.device)["allocation"]["all"]
        return stats["allocated"], stats["freed"]

    def nodes(self):
        return int(_checked(self.cu.cuGraphGetNodes(self.graph, 0))[-1])

    def mark(self):
        self._safely(self._mark)

    def mark_if_grown(self):
        self._safely(lambda: self.nodes() == self.marks[-1][0] or self._mark())

    def _safely(self, action):
        if self.busy or self.broken:
            return
        self.busy = True
        try:
            action()
        except Exception as error:
            self.broken = repr(error)
        finally:
            self.busy = False

    def _mark(self):
        allocated, freed = self._counts()
        mark = [self.nodes(), allocated - self.allocated, freed - self.freed, self._stack()]
        if not self.marks or self.marks[-1] != mark:
            self.marks.append(mark)

    def _stack(self):
        frames = _user_stack(sys._getframe(1))
        key = tuple((f["file"], f["line"]) for f in frames)
        if key not in self.known:
            self.known[key] = len(self.stacks)
            self.stacks.append(frames)
        return self.known[key]


class _Calls:
    """Marks after every call into C that added nodes: sees kernels that are launched past the dispatcher (Triton).

    By the interpreter's own hook: `sys.setprofile` copies a frame's variables before each event (until Python 3.13), and
    so would keep tensors alive that the program has dropped, and change what it studies.
    """

    HOOK = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
    C_RETURN = 6

    def __init__(self, marks):
        self.marks, self.previous, self.hook = marks, None, self.HOOK(self._event)

    def _event(self, _owner, _frame, event, _argument):
        if event == self.C_RETURN:
            self.marks.mark_if_grown()
        return 0

    def __enter__(self):
        self.previous = sys.getprofile()
        ctypes.pythonapi.PyEval_SetProfile(self.hook, ctypes.py_object(None))

    def __exit__(self, *_):
        sys.setprofile(self.previous)


def _dispatch_mode(marks):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Dispatch(TorchDispatchMode):
        """Marks before and after every dispatched operation, and leaves compiled code compiled."""

        supports_higher_order_operators = True

        @classmethod
        def ignore_compile_internals(cls):
            return True

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            marks.mark()
            answer = function(*args, **(kwargs or {}))
            marks.mark()
            return answer

    return Dispatch()


# Operators such as `a @ b` are no calls to Python's profiler, Triton kernels none to the dispatcher: "both" sees both.
_WATCHES = {"dispatch": [_dispatch_mode], "calls": [_Calls], "both": [_dispatch_mode, _Calls]}
_ACTIONS = ("alloc", "free_requested", "free_completed", "segment_alloc", "segment_free")


def _trace(device):
    import torch

    return torch.cuda.memory._snapshot()["device_traces"][device]


def _event(entry):
    return {
        "action": entry["action"],
        "addr": entry["addr"],
        "size": entry["size"],
        "stream": entry.get("stream"),
        "where": _frames(entry.get("frames") or []),
    }


def _live(snapshot, device):
    """Every block alive in the allocator's snapshot."""
    blocks = []
    for segment in snapshot["segments"]:
        if segment.get("device", device) != device:
            continue
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"].startswith("active"):
                blocks.append({
                    "addr": block.get("address", address),
                    "size": block.get("requested_size", block["size"]),
                    "stream": segment.get("stream"),
                    "where": _frames(block.get("frames") or []),
                })
            address += block["size"]
    return blocks


def _is_users(path):
    ours = (os.path.abspath(__file__), os.path.join(os.path.dirname(os.path.abspath(__file__)), "sitecustomize.py"))
    library = path.endswith("contextlib.py") or any(f"{os.sep}{p}{os.sep}" in path for p in ("torch", "triton"))
    return not library and not path.startswith("<frozen") and os.path.abspath(path) not in ours


def _frames(frames):
    """An allocator stack without the frames of PyTorch and of this file."""
    users = [f for f in frames if _is_users(f["filename"])]
    return [{"function": f["name"], "file": f["filename"], "line": f["line"]} for f in users[:FRAMES]]


def _user_stack(frame):
    found = []
    while frame is not None and len(found) < FRAMES:
        code = frame.f_code
        if _is_users(code.co_filename):
            found.append({"function": code.co_name, "file": code.co_filename, "line": frame.f_lineno or 0})
        frame = frame.f_back
    return found


def _bucket():
    """The bucket that the caller captures, where its code says so in a variable that servers call so."""
    frame = sys._getframe(1)
    while frame is not None:
        if _is_users(frame.f_code.co_filename):
            for name in ("bs", "batch_size", "num_tokens", "bucket"):
                value = _variable(frame, name)
                if type(value) is int:
                    return f"{name}={value}"
        frame = frame.f_back
    return None


_CO_OPTIMIZED = 1


def _variable(frame, name):
    """A variable of a frame. Until Python 3.13 a function's variables come as a copy that the frame keeps, and with it
    every tensor in it: it is emptied."""
    variables = frame.f_locals
    value = variables.get(name)
    if frame.f_code.co_flags & _CO_OPTIMIZED and type(variables) is dict:
        variables.clear()
    return value


def _process(torch):
    """What the process is called among those of its program: tensor-parallel ranks capture the same buckets."""
    distributed = getattr(torch, "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return f"rank {distributed.get_rank()} (process {os.getpid()})"
    return None


def _write(document, path, name):
    if name:
        document["name"] = name
    partial = f"{path}.partial"
    with open(partial, "w", encoding="utf-8") as file:
        json.dump(document, file, separators=(",", ":"))
    os.replace(partial, path)


# The graph itself, through the driver.

def _driver():
    try:
        from cuda.bindings import driver
    except ImportError:
        from cuda import cuda as driver
    return driver


def _checked(answer):
    if int(answer[0]) != 0:
        raise RuntimeError(f"the CUDA driver answers {answer[0]}")
    return answer[1:] if len(answer) > 2 else (answer[1] if len(answer) == 2 else None)


def _graph(handle):
    import torch

    cu, early = _driver(), []
    nodes, edges = _nodes_and_edges(cu, cu.CUgraph(handle), early)
    warnings = [f"order is assumed along {len(early)} programmatic edges, where only the kernels keep it"] if early else []
    source = f"PyTorch {torch.__version__}, CUDA {torch.version.cuda}"
    return {"format": FORMAT, "source": source, "warnings": warnings, "nodes": nodes, "edges": edges, "marks": []}


def _nodes_and_edges(cu, graph, early):
    """`early` takes the edges along which a node may start before the one in front of it has ended."""
    _, count = _checked(cu.cuGraphGetNodes(graph, 0))
    handles, _ = _checked(cu.cuGraphGetNodes(graph, count)) if count else ([], 0)
    index = {int(handle): at for at, handle in enumerate(handles)}
    # The call without edge data refuses graphs that have any; newer bindings have only the other, under the old name.
    get_edges = getattr(cu, "cuGraphGetEdges_v2", None) or cu.cuGraphGetEdges
    answer = get_edges(graph, 0)
    _checked(answer)
    edges = []
    if answer[-1]:
        answer = get_edges(graph, answer[-1])
        _checked(answer)
        edges = [[index[int(a)], index[int(b)]] for a, b in zip(answer[1], answer[2])]
        data = answer[3] if len(answer) == 5 else []
        early += [edge for edge, of in zip(edges, data) if of is not None and int(of.type) == PROGRAMMATIC]
    return [_node(cu, handle, early) for handle in handles], edges


def _node(cu, handle, early):
    kind = str(_checked(cu.cuGraphNodeGetType(handle))).split(".")[-1].split(":")[0]
    kind = kind.replace("CU_GRAPH_NODE_TYPE_", "").lower()
    record = {"kind": kind, "name": None, "params": []}
    if kind == "graph":
        child = _checked(cu.cuGraphChildGraphNodeGetGraph(handle))
        record["nodes"], record["edges"] = _nodes_and_edges(cu, child, early)
        return record
    reader = {"kernel": _kernel, "memcpy": _memcpy, "memset": _memset}.get(kind)
    if reader is not None:
        reader(cu, handle, record)
    return record


def _kernel(cu, handle, record):
    parameters = _checked(cu.cuGraphKernelNodeGetParams(handle))
    function = int(parameters.func or 0)
    if function:
        name = cu.cuFuncGetName(parameters.func)
    if not function or int(name[0]) != 0:
        name = cu.cuKernelGetName(parameters.kern)
    record["name"] = _checked(name).decode()
    signature = _demangled(record["name"])
    if signature:
        record["signature"] = signature
    record["grid"] = [parameters.gridDimX, parameters.gridDimY, parameters.gridDimZ]
    record["params"] = _plain(cu, parameters, function) or _packed(parameters)


def _demangled(name):
    """The name with parameter types: which pointers are const."""
    import torch

    demangle = getattr(torch._C, "_demangle", None)
    if demangle is None or not name.startswith("_Z"):
        return None
    signature = demangle(name)
    return signature if signature != name else None


def _plain(cu, parameters, function):
    """Parameters given one by one; structs by value and tensor maps come as their bytes."""
    pointers = int(parameters.kernelParams or 0)
    if not pointers:
        return []
    table = ctypes.cast(pointers, ctypes.POINTER(ctypes.c_void_p))
    blobs = []
    while True:
        size = _parameter_size(cu, parameters, function, len(blobs))
        if size is None:
            return blobs
        blobs.append(ctypes.string_at(table[len(blobs)], size).hex())


def _parameter_size(cu, parameters, function, index):
    query = getattr(cu, "cuFuncGetParamInfo" if function else "cuKernelGetParamInfo", None)
    if query is None:
        return _parameter_size_by_ctypes(parameters, function, index)
    answer = query(parameters.func if function else parameters.kern, index)
    return None if int(answer[0]) == NO_SUCH_PARAMETER else int(_checked(answer)[1])


def _parameter_size_by_ctypes(parameters, function, index):
    """For bindings older than the driver's call."""
    library = ctypes.CDLL("libcuda.so.1")
    query = library.cuFuncGetParamInfo if function else library.cuKernelGetParamInfo
    owner = ctypes.c_void_p(function or int(parameters.kern))
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    failed = query(owner, ctypes.c_size_t(index), ctypes.byref(offset), ctypes.byref(size))
    if failed not in (0, NO_SUCH_PARAMETER):
        raise RuntimeError(f"the CUDA driver answers {failed} when asked for a kernel's parameters")
    return None if failed else size.value


def _packed(parameters):
    """Parameters given as one buffer (`extra`): CU_LAUNCH_PARAM_BUFFER_POINTER is 1, ..._SIZE is 2."""
    extra = int(parameters.extra or 0)
    if not extra:
        return []
    table = ctypes.cast(extra, ctypes.POINTER(ctypes.c_void_p))
    at, buffer, size = 0, None, 0
    while table[at]:
        if table[at] == 1:
            buffer = table[at + 1]
        elif table[at] == 2:
            size = ctypes.cast(table[at + 1], ctypes.POINTER(ctypes.c_size_t))[0]
        at += 2
    return [ctypes.string_at(buffer, size).hex()] if buffer and size else []


def _memcpy(cu, handle, record):
    copy = _checked(cu.cuGraphMemcpyNodeGetParams(handle))
    ends = []
    for side in ("src", "dst"):
        device, pitch, height = (int(getattr(copy, side + field) or 0) for field in ("Device", "Pitch", "Height"))
        x, y, z = (int(getattr(copy, side + field)) for field in ("XInBytes", "Y", "Z"))
        ends.append((device + z * pitch * height + y * pitch + x if device else 0, pitch))
    record["params"] = [address.to_bytes(8, "little").hex() for address, _ in ends]
    record["pitch"] = [pitch for _, pitch in ends]
    record["bytes"] = int(copy.WidthInBytes)
    record["rows"] = max(int(copy.Height), 1) * max(int(copy.Depth), 1)


def _memset(cu, handle, record):
    fill = _checked(cu.cuGraphMemsetNodeGetParams(handle))
    record["params"] = [int(fill.dst).to_bytes(8, "little").hex()]
    record["pitch"] = [int(fill.pitch)]
    record["bytes"] = int(fill.width) * int(fill.elementSize)
    record["rows"] = max(int(fill.height), 1)
