"""Compile and launch the product's kernels from Python, beside PyTorch and Triton in one process.

Needs a GPU, torch and cuda-bindings. The engine itself launches the same files from Rust.
"""
import ctypes
import os

import torch
from cuda.bindings import driver, nvrtc

KERNELS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "kernels")


def check(result):
    """Raises on an error code; otherwise what the call returned besides it."""
    if int(result[0]) != 0:
        raise RuntimeError(str(result[0]))
    return result[1] if len(result) == 2 else result[1:]


class Module:
    """One source file of `kernels/`, compiled for the device at hand."""

    def __init__(self, name, *options):
        with open(os.path.join(KERNELS, name), "rb") as file:
            source = file.read()
        program = check(nvrtc.nvrtcCreateProgram(source, name.encode(), 0, [], []))
        major, minor = torch.cuda.get_device_capability()
        suffix = "a" if major >= 9 else ""
        options = [f"--gpu-architecture=sm_{major}{minor}{suffix}", "--std=c++17", f"-I{KERNELS}", *options]
        result = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        if int(result[0]) != 0:
            log = b" " * check(nvrtc.nvrtcGetProgramLogSize(program))
            nvrtc.nvrtcGetProgramLog(program, log)
            raise RuntimeError(log.decode())
        self.cubin = b" " * check(nvrtc.nvrtcGetCUBINSize(program))
        nvrtc.nvrtcGetCUBIN(program, self.cubin)
        torch.cuda.current_stream()
        torch.zeros(1, device="cuda")
        self.module = check(driver.cuModuleLoadData(self.cubin))

    def kernel(self, name, threads, shared=0):
        """A launcher: `kernel(grid, arguments...)` on PyTorch's current stream."""
        function = check(driver.cuModuleGetFunction(self.module, name.encode()))
        if shared > 48 * 1024:
            limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            check(driver.cuFuncSetAttribute(function, limit, shared))
        return lambda grid, *arguments: launch(function, grid, threads, shared, arguments)


def pack(arguments):
    """The argument array of a launch, and what must stay alive until it returns."""
    cells = []
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            cells.append(ctypes.c_uint64(argument.data_ptr()))
        elif isinstance(argument, float):
            cells.append(ctypes.c_float(argument))
        elif isinstance(argument, int):
            cells.append(ctypes.c_int32(argument))
        else:
            cells.append(argument)
    array = (ctypes.c_void_p * len(cells))(*[ctypes.addressof(cell) for cell in cells])
    return array, cells


def launch(function, grid, threads, shared, arguments):
    array, _cells = pack(arguments)
    x, y = grid if isinstance(grid, tuple) else (grid, 1)
    stream = torch.cuda.current_stream().cuda_stream
    check(driver.cuLaunchKernel(function, x, y, 1, threads, 1, 1, shared, stream, ctypes.addressof(array), 0))


def tensor_map(tensor, element, dims, strides, box):
    """A three-dimensional tensor map swizzled by 128 bytes, as an aligned ctypes array."""
    types = driver.CUtensorMapDataType
    kind = {"bf16": types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, "u8": types.CU_TENSOR_MAP_DATA_TYPE_UINT8}[element]
    encoded = check(driver.cuTensorMapEncodeTiled(
        kind, 3, tensor.data_ptr(), [driver.cuuint64_t(d) for d in dims], [driver.cuuint64_t(s) for s in strides],
        [driver.cuuint32_t(b) for b in box], [driver.cuuint32_t(1)] * 3,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE, driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE))
    words = [int(word) for word in encoded.opaque]
    raw = (ctypes.c_uint64 * 24)()
    start = (64 - ctypes.addressof(raw) % 64) % 64 // 8
    for i, word in enumerate(words):
        raw[start + i] = word
    cell = (ctypes.c_uint64 * 16).from_buffer(raw, start * 8)
    return cell
