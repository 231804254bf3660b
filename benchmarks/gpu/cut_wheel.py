"""Cut a wheel down to the kernel files that the benchmark loads, for a machine without a network.

    python benchmarks/gpu/cut_wheel.py vllm-*.whl sglang-*.whl --out FOLDER

Metadata and licences stay, so that the version is known; install with ``pip install --no-deps``.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import io
import zipfile
from fnmatch import fnmatch
from pathlib import Path

MAMBA = "vllm/model_executor/layers/mamba/ops"
DELTA = "vllm/third_party/flash_linear_attention/ops"
LINEAR = "sglang/kernels/ops/attention/linear"
KEEP = (
    f"{MAMBA}/mamba_ssm.py",
    f"{MAMBA}/triton_helpers.py",
    f"{MAMBA}/replayssm_config.py",
    f"{MAMBA}/selective_state_update_replayssm_output_only.py",
    f"{MAMBA}/configs/selective_state_update/*NVIDIA*",
    f"{DELTA}/op.py",
    f"{DELTA}/fused_recurrent.py",
    f"{DELTA}/fused_sigmoid_gating.py",
    f"{LINEAR}/fused_sigmoid_gating_recurrent.py",
    f"{LINEAR}/fused_recurrent_linear_replayssm.py",
    f"{LINEAR}/gdn_replayssm_spec_decode.py",
    "sglang/kernels/ops/mamba/triton_ops/mamba_ssm.py",
    "*.dist-info/METADATA",
    "*.dist-info/WHEEL",
    "*.dist-info/licenses/*",
)


def cut(source: Path, folder: Path) -> Path:
    """Write the smaller wheel under the same name and return its path."""
    target = folder / source.name
    table = io.StringIO()
    rows = csv.writer(table, lineterminator="\n")
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            if not any(fnmatch(name, pattern) for pattern in KEEP):
                continue
            content = old.read(name)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=")
            rows.writerow((name, f"sha256={digest.decode()}", len(content)))
            new.writestr(name, content)
        record = next(x for x in old.namelist() if x.endswith(".dist-info/RECORD"))
        rows.writerow((record, "", ""))
        new.writestr(record, table.getvalue())
    return target


def main() -> None:
    """Cut every wheel named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("wheels", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for wheel in args.wheels:
        made = cut(wheel, args.out)
        print(f"{made}: {made.stat().st_size} bytes")


if __name__ == "__main__":
    main()
