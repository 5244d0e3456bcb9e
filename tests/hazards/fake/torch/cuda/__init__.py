"""Streams and operations."""

import functools

from torch.cuda import memory
from torch.utils._python_dispatch import dispatch

MAIN, SIDE = 1, 2


class Stream:
    def __init__(self, number):
        self.cuda_stream = number


_current = [MAIN]


class stream:  # noqa: N801
    def __init__(self, number):
        self.number = number

    def __enter__(self):
        _current.append(self.number)

    def __exit__(self, *_):
        _current.pop()


def current_stream(device=None):
    return Stream(_current[-1])


def current_device():
    return 0


def memory_stats_as_nested_dict(device):
    return {"allocation": {"all": {"allocated": memory.allocated, "freed": memory.freed}}}


# A call into C, as `sys.setprofile` sees one: the operation itself runs inside it.
_into_c = functools.partial(functools.reduce, lambda _, step: step())


def launch(name, *pointers, kind="kernel", **fields):
    """One operation of the program."""
    return dispatch(lambda: _into_c([lambda: graphs.launch(name, pointers, kind, fields)], None))


from torch.cuda import graphs  # noqa: E402

CUDAGraph = graphs.CUDAGraph
