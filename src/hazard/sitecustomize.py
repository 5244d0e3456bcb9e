"""Exports every CUDA graph that this process captures to the folder in TOOLSTORM_CAPTURE_DIR.

Python imports this module at its start; it waits for torch, wraps the capture of its graphs, and hands over to the
sitecustomize that it hides.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import traceback

HERE = os.path.dirname(os.path.abspath(__file__))
WANTED = "torch.cuda.graphs"


def _numbered(folder, extension):
    """Names for files of this process, one after the other; a fork counts on under its own number."""
    count = 0

    def path():
        nonlocal count
        count += 1
        return os.path.join(folder, f"{os.getpid():010}-{count:05}.{extension}")

    return path


def _came(folder, marker):
    """Leave word of how far a process came, for a report that has no graph to show."""
    try:
        with open(os.path.join(folder, marker), "w", encoding="utf-8"):
            pass
    except OSError:
        pass


class _Wrapping(importlib.abc.Loader):
    """Loads a module as its own loader would, then wraps its graph class; whatever fails here, the module is loaded."""

    def __init__(self, loader, folder, marks):
        self.loader, self.folder, self.marks = loader, folder, marks

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        module.__loader__ = module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        _came(self.folder, "torch-imported")
        try:
            self._wrap(module)
        except Exception:
            traceback.print_exc()

    def _wrap(self, module):
        spec = importlib.util.spec_from_file_location("toolstorm_capture", os.path.join(HERE, "toolstorm_capture.py"))
        capture = importlib.util.module_from_spec(spec)
        sys.modules.setdefault("toolstorm_capture", capture)
        spec.loader.exec_module(capture)
        names = [_numbered(self.folder, extension) for extension in ("json", "failed")]
        capture.install(module.CUDAGraph, names[0], self.marks, failed=names[1])


class _Finder(importlib.abc.MetaPathFinder):
    """Meets the import of the graphs module, once."""

    def __init__(self, folder, marks):
        self.folder, self.marks = folder, marks

    def find_spec(self, name, path, target=None):
        if name != WANTED:
            return None
        sys.meta_path.remove(self)
        finders = [finder for finder in sys.meta_path if hasattr(finder, "find_spec")]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in finders)), None)
        if spec is not None and hasattr(spec.loader, "exec_module"):
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
    _came(os.environ["TOOLSTORM_CAPTURE_DIR"], "python-started")
    sys.meta_path.insert(
        0, _Finder(os.environ["TOOLSTORM_CAPTURE_DIR"], os.environ.get("TOOLSTORM_CAPTURE_MARKS", "both"))
    )
_hand_over()
