"""A caching allocator: blocks of one size are handed out again at once."""

import sys

BASE = 0x7F00_0000_0000
allocated = freed = 0
_history = None
_free = {}
_live = {}
_top = BASE


def _frames():
    found, frame = [], sys._getframe(2)
    while frame is not None:
        found.append({"name": frame.f_code.co_name, "filename": frame.f_code.co_filename, "line": frame.f_lineno})
        frame = frame.f_back
    return found


def _record(action, address, size):
    if _history is not None:
        _history.append({"action": action, "addr": address, "size": size, "stream": 1, "frames": _frames()})


class Tensor:
    def __init__(self, size):
        global allocated, _top
        self.size = size
        if _free.get(size):
            self.address = _free[size].pop()
        else:
            self.address, _top = _top, _top + size
        allocated += 1
        _live[self.address] = size
        _record("alloc", self.address, size)

    def __del__(self):
        global freed
        freed += 1
        del _live[self.address]
        _free.setdefault(self.size, []).append(self.address)
        _record("free_requested", self.address, self.size)
        _record("free_completed", self.address, self.size)


def _record_memory_history(enabled="all", max_entries=0, stacks="all"):
    global _history
    _history = None if enabled is None else []


def _snapshot():
    blocks = [{"address": a, "size": s, "requested_size": s, "state": "active_allocated"} for a, s in _live.items()]
    segment = {"device": 0, "address": BASE, "total_size": _top - BASE, "stream": 1, "blocks": blocks}
    return {"segments": [segment], "device_traces": [list(_history or [])]}
