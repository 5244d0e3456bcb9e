"""Exports every CUDA graph that this process captures to the folder in TOOLSTORM_CAPTURE_DIR.

Python imports this module at its start; it waits for torch, wraps the capture of its graphs, and hands over to the
sitecustomize that it hides.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
WANTED = "torch.cuda.graphs"


def _target(folder):
    count = 0

    def target():
        nonlocal count
        count += 1
        return os.path.join(folder, f"{os.getpid():010}-{count:05}.json")

    return target


class _Wrapping(importlib.abc.Loader):
    """Loads a module as its own loader would, then wraps its graph class."""

    def __init__(self, loader, folder, marks):
        self.loader, self.folder, self.marks = loader, folder, marks

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        self.loader.exec_module(module)
        spec = importlib.util.spec_from_file_location("toolstorm_capture", os.path.join(HERE, "toolstorm_capture.py"))
        capture = importlib.util.module_from_spec(spec)
        sys.modules.setdefault("toolstorm_capture", capture)
        spec.loader.exec_module(capture)
        capture.install(module.CUDAGraph, _target(self.folder), self.marks)


class _Finder(importlib.abc.MetaPathFinder):
    """Meets the import of the graphs module, once."""

    def __init__(self, folder, marks):
        self.folder, self.marks = folder, marks

    def find_spec(self, name, path, target=None):
        if name != WANTED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Wrapping(spec.loader, self.folder, self.marks)
        return spec


def _hand_over():
    """Run the sitecustomize that would have been found without us."""
    elsewhere = [entry for entry in sys.path if os.path.abspath(entry or ".") != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


if os.environ.get("TOOLSTORM_CAPTURE_DIR"):
    sys.meta_path.insert(
        0, _Finder(os.environ["TOOLSTORM_CAPTURE_DIR"], os.environ.get("TOOLSTORM_CAPTURE_MARKS", "both"))
    )
_hand_over()
