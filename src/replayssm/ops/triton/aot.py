"""Ahead-of-time compilation of launches for a device that is not here, and what it cost."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

if TYPE_CHECKING:
    from replayssm.ops.triton.call import Call

POINTERS = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int8: "*i8",
    torch.uint8: "*u8", torch.uint16: "*u16", torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


@dataclass(frozen=True, slots=True)
class Resources:
    """What one compiled launch takes.

    Attributes:
        registers: Of a thread; None where no disassembler tells.
        spilled: Bytes of a thread's stack that hold spilled registers.
        shared: Bytes of shared memory.
    """

    registers: int | None
    spilled: int | None
    shared: int


def compile_call(call: Call, target: str) -> Resources:
    """Compile a launch for ``target``, one of :data:`TARGETS`, and return what it takes."""
    names = call.kernel.arg_names
    signature, aligned = {}, {}
    for i, (name, value) in enumerate(zip(names, call.args, strict=False)):
        signature[name] = _type_of(value)
        if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
            aligned[(i,)] = [["tt.divisibility", 16]]
    constants: dict[str, Any] = dict(call.constants)
    if target.startswith("gfx"):
        constants["ASM"] = False
    elif "ASM" in constants:
        constants["ASM"] = True
    constants = {name: value for name, value in constants.items() if name in names}
    for name in constants:
        signature[name] = "constexpr"
    options = {"num_warps": call.warps, "num_stages": 1}
    if call.registers and not target.startswith("gfx"):
        options["maxnreg"] = call.registers
    kind = GluonASTSource if call.kernel.is_gluon() else ASTSource
    source = kind(call.kernel, signature, constants, aligned)
    built = triton.compile(source, target=TARGETS[target], options=options)
    registers, spilled = (None, None) if target.startswith("gfx") else _cubin(built.asm["cubin"])
    return Resources(registers, spilled, int(built.metadata.shared))


def _type_of(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if abs(int(str(value))) < 2**31 else "i64"


def _cubin(binary: bytes) -> tuple[int | None, int | None]:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(binary)
        command = [str(tool), "--dump-resource-usage", str(path)]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (None, None)
