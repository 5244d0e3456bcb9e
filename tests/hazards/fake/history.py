"""Whatever fails around a capture: the allocator's history is off after it, and a graph is told lost at most once."""

import sys

import torch
from torch.cuda import graphs, memory
from toolstorm_capture import _Recorder, install

lost = []


def failed():
    lost.append(None)
    return f"{sys.argv[1]}/{len(lost)}.failed"


def fail(*_, **__):
    raise ValueError("broken on purpose")


def capture():
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()
    graph.capture_end()


def after(owner, name, expected_loss, reaches_program):
    """Captures once with `owner.name` broken."""
    whole = getattr(owner, name)
    setattr(owner, name, fail)
    lost.clear()
    undo = install(torch.cuda.CUDAGraph, lambda: f"{sys.argv[1]}/graph.json", failed=failed)
    try:
        capture()
        assert not reaches_program, f"{name}: the program's own failure was swallowed"
    except ValueError:
        assert reaches_program, f"{name}: ours reached the program"
    finally:
        undo()
        setattr(owner, name, whole)
    assert memory._history is None, f"{name}: the history is still on"
    assert len(lost) == expected_loss, f"{name}: told {len(lost)} times"


base = graphs.CUDAGraph.__mro__[1]
after(base, "capture_begin", 0, True)
after(base, "capture_end", 0, True)
for step in ("begin", "end", "read", "write"):
    after(_Recorder, step, 1, False)
