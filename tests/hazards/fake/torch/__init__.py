"""As much of PyTorch as the exporter touches, without a GPU: an allocator, streams, captured graphs."""

from . import _C, cuda, version  # noqa: F401

__version__ = "0-fake"
