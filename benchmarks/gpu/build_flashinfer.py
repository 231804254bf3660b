"""Compile FlashInfer's state-space modules ahead of time, for a machine that cannot fetch packages.

    python benchmarks/gpu/build_flashinfer.py --package FOLDER --ffi FOLDER --out FOLDER --only T1

FOLDER of ``--package`` is an unpacked ``flashinfer-python`` wheel, of ``--ffi`` an unpacked
``apache-tvm-ffi`` wheel. Where FlashInfer is installed with a compiler this is not needed: the
benchmark then asks the package itself. The kernels are FlashInfer's own files; its launcher is cut
to what is timed (one length for all sequences, softplus on), since each specialisation otherwise
takes several minutes to compile.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

TYPES = {"f32": "float", "bf16": "nv_bfloat16"}
LAUNCHER = "flashinfer/mamba/launch_checkpointing_ssu.cuh"
CCCL = ("cub", "libcudacxx/include", "thrust")
SYSTEM = ("csrc", "cutlass/include", "cutlass/tools/util/include", "spdlog/include")
# what a launch never takes here, as written in the launcher: text, and what stands for it
CUTS = (
    ("if (is_varlen) {\n      launch.template operator()<D_SPLIT, true>();\n    } else {", "{"),
    (
        "} else {\n            launch_precompute.template operator()<HEADS_PER_CTA, PNW, false>();",
        "",
    ),
)


@dataclass(frozen=True)
class Module:
    """One compiled specialisation; the benchmark finds it by ``name``."""

    kernel: str
    state: str
    tokens: int
    window: int = 16
    heads_per_group: int = 16
    groups: int = 8

    @property
    def name(self) -> str:
        """File name without suffix."""
        return f"{self.kernel}_{self.state}_t{self.tokens}"

    @property
    def sources(self) -> tuple[str, ...]:
        """Files of FlashInfer's csrc folder."""
        if self.kernel == "selective_state_update":
            return (
                f"{self.kernel}.cu",
                f"{self.kernel}_kernel_inst.cu",
                "flashinfer_mamba_binding.cu",
            )
        return (
            f"{self.kernel}.cu",
            f"{self.kernel}_kernel_inst.cu",
            f"{self.kernel}_jit_binding.cu",
        )

    def values(self) -> dict[str, str]:
        """Return what the configuration template of this kernel asks for."""
        return {
            "state_dtype": TYPES[self.state], "input_dtype": TYPES["bf16"],
            "dt_dtype": TYPES["bf16"], "weight_dtype": TYPES["bf16"], "matrixA_dtype": "float",
            "stateIndex_dtype": "int32_t", "cu_seqlens_dtype": "int32_t",
            "num_accepted_tokens_dtype": "int32_t", "state_scale_type": "void", "dim": "64",
            "dstate": "128", "ntokens_mtp": str(self.tokens), "npredicted": str(self.tokens),
            "max_window": str(self.window), "heads_per_group": str(self.heads_per_group),
            "num_groups": str(self.groups), "philox_rounds": "0", "enable_pdl": "false",
        }  # fmt: skip


MODULES = [
    *(Module("checkpointing_ssu", state, 1) for state in ("f32", "bf16")),
    *(Module("selective_state_update", state, 1) for state in ("f32", "bf16")),
    *(Module("checkpointing_ssu", state, t) for t in (4, 8) for state in ("f32", "bf16")),
]


def prepare(module: Module, data: Path, work: Path) -> Path:
    """Write configuration, sources and the cut launcher of a module; return their folder."""
    folder = work / module.name
    launcher = folder / "include" / LAUNCHER
    launcher.parent.mkdir(parents=True, exist_ok=True)
    config = (data / f"csrc/{module.kernel}_customize_config.jinja").read_text()
    for name, value in module.values().items():
        config = config.replace("{{ " + name + " }}", value)
    (folder / f"{module.kernel}_config.inc").write_text(config)
    for source in module.sources:
        (folder / source).write_text((data / "csrc" / source).read_text())
    text = (data / "include" / LAUNCHER).read_text()
    for old, new in CUTS:
        if text.count(old) != 1:
            raise SystemExit(f"{LAUNCHER}: the text to cut is not there once: {old!r}")
        text = text.replace(old, new)
    launcher.write_text(text)
    return folder


def command(folder: Path, module: Module, data: Path, ffi: Path, out: Path) -> list[str]:
    """Return the compiler's command line, with the package's own flags."""
    first = [folder / "include", *(data / "cccl" / x for x in CCCL)]
    system = [ffi / "tvm_ffi/include", data / "include", (data / "include" / LAUNCHER).parent,
              *(data / x for x in SYSTEM)]  # fmt: skip
    return [
        "nvcc", "-shared", "-std=c++17", "--threads=1", "-use_fast_math", "-O3", "-DNDEBUG",
        "-Xfatbin=-compress-all", "--compress-mode=size", "--compiler-options=-fPIC",
        "--expt-relaxed-constexpr", "-static-global-template-stub=false",
        "-gencode=arch=compute_90a,code=sm_90a", "-DFLASHINFER_ENABLE_F16",
        "-DFLASHINFER_ENABLE_BF16", "-DFLASHINFER_ENABLE_FP8_E4M3",
        "-DFLASHINFER_ENABLE_FP8_E5M2", "-DFLASHINFER_MAMBA_ENABLE_SM90",
        "-DPy_LIMITED_API=0x03090000",
        *(f"-I{path}" for path in first), *(f"-isystem={path}" for path in system),
        "-cudart", "static", "-o", str(out / f"{module.name}.so"),
        *(str(folder / source) for source in module.sources),
    ]  # fmt: skip


def main() -> None:
    """Compile every module that is not there yet, one after another."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--package", type=Path, required=True)
    parser.add_argument("--ffi", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, help="for generated sources; beside --out by default")
    parser.add_argument("--only", nargs="*", help="module names; all by default")
    args = parser.parse_args()
    data = args.package / "flashinfer/data"
    args.out.mkdir(parents=True, exist_ok=True)
    for module in MODULES:
        target = args.out / f"{module.name}.so"
        if target.exists() or (args.only and module.name not in args.only):
            continue
        folder = prepare(module, data, args.work or args.out.parent / "flashinfer-sources")
        start = time.perf_counter()
        done = subprocess.run(command(folder, module, data, args.ffi, args.out), check=False)
        print(
            module.name, f"{time.perf_counter() - start:.0f} s, exit {done.returncode}", flush=True
        )
        if done.returncode:
            sys.exit(done.returncode)


if __name__ == "__main__":
    main()
