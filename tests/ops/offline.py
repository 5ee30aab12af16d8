"""Compile kernels for a GPU that is not at hand and print their shared memory in bytes; run by `test_launch.py`."""

import json
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from linformers.ops import launch

TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}
# Pointers whose type is not that of the queries.
POINTERS = {"MASK": "*u8", "SEED": "*i64", "LENGTHS": "*i64", "LSE": "*fp32", "DELTA": "*fp32", "PARTS": "*fp32"}


def shapes(b, h, n, d, k, dtype):
    """With a mask and dropout, which need the most memory."""
    query, key = (n * h * d, d, h * d, 1), (k * h * d, d, h * d, 1)
    strides = {"Q": query, "K": key, "V": key, "MASK": (k, 0, 1), "DOUT": (n * h * d, h * d, d, 1)}
    ordered = tuple(strides.get(name) for name in launch.STRIDES)
    return launch.Shapes((b, h, n, d), k, ordered, dtype, torch.device("cuda", 0), 0, d**-0.5, 0.1, exact=True)


def shared_bytes(name, own, capability):
    plan = launch.Plan(name, own)
    tensors = dict(plan.tensors)
    absent = {"NEAR_K", "NEAR_V", "LENGTHS", *(("LSE",) if name == "forward_resident" else ())}
    signature, constants, divisible = {}, {}, {}
    for place, (parameter, value) in enumerate(zip(plan.kernel.params, plan.arguments, strict=True)):
        kind = "constexpr"
        if place in tensors and tensors[place] not in absent:
            kind = POINTERS.get(tensors[place], TYPES[own.dtype])
        elif not parameter.is_constexpr and place not in tensors and value != 1:
            kind = "fp32" if isinstance(value, float) else "i32"
        signature[parameter.name] = kind
        if kind == "constexpr":
            constants[(place,)] = value
        elif kind != "fp32" and (place in tensors or value % 16 == 0):
            divisible[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(plan.kernel, signature, constants, divisible)
    compiled = triton.compile(source, GPUTarget("cuda", capability, 32), {"num_warps": plan.warps})
    return compiled.metadata.shared


if __name__ == "__main__":
    capability, memory, kernels = json.loads(sys.argv[1])
    launch.num_processors = lambda device: 128
    launch.shared_memory = lambda device: memory
    sizes = [(name, shapes(4, 12, 512, d, k, getattr(torch, dtype))) for name, d, k, dtype in kernels]
    print(json.dumps([shared_bytes(*size, capability) for size in sizes]))
