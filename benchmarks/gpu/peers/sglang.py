"""SGLang's Triton kernels: standard steps, and replay of GDN and KDA that stores the corrected u.

Kernel files only are loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from gpu.arms import (
    STATES,
    Cycle,
    Kind,
    block_cycle,
    decode_cycle,
    new_states,
    standard_traffic,
    steps_of_rows,
)
from gpu.peers.common import mamba, packed
from gpu.peers.loading import bare, load, stand_in

if TYPE_CHECKING:
    from torch import Tensor

    from gpu.arms import Arm, StateSet, Traffic
    from gpu.cases import Inputs, Point

LINEAR = "sglang.kernels.ops.attention.linear"
MAMBA = "sglang.kernels.ops.mamba.triton_ops"


class MambaUpdate:
    """A standard Mamba-2 step."""

    def __init__(self, update: Any, point: Point, state: Tensor, steps: int) -> None:  # noqa: ANN401
        self.update, self.point, self.state = update, point, state
        self.index = torch.arange(point.batch, dtype=torch.int32, device=state.device)

    def load(self, inputs: Inputs) -> None:
        """Take inputs."""
        x = mamba(self.point, inputs)
        self.token = (x.x, x.dt, x.decay, x.b, x.c, x.skip)
        self.bias, self.out = x.bias, torch.full_like(inputs.v, torch.nan)

    def launch(self, step: int) -> Tensor:
        """Launch one step."""
        self.update(
            self.state, *self.token, dt_bias=self.bias, dt_softplus=True,
            state_batch_indices=self.index, out=self.out,
        )  # fmt: skip
        return self.out


class DeltaUpdate:
    """A standard GDN or KDA step, gates formed in the kernel."""

    def __init__(self, update: Any, point: Point, state: Tensor, steps: int) -> None:  # noqa: ANN401
        self.update, self.point, self.state = update, point, state
        self.index = torch.arange(point.batch, dtype=torch.int32, device=state.device)
        self.ends = torch.arange(point.batch + 1, dtype=torch.int32, device=state.device)

    def load(self, inputs: Inputs) -> None:
        """Take inputs, one token a row."""
        self.tokens = {
            "q": inputs.q.transpose(0, 1),
            "k": inputs.k.transpose(0, 1),
            "v": inputs.v.transpose(0, 1),
            "a": inputs.a[:, 0].flatten(1),
            "b": inputs.b[:, 0],
            "A_log": inputs.a_log,
            "dt_bias": inputs.bias,
        }

    def launch(self, step: int) -> Tensor:
        """Launch one step; the function allocates the outputs."""
        out: Tensor = self.update(
            **self.tokens, softplus_beta=1.0, softplus_threshold=20.0,
            initial_state_source=self.state, initial_state_indices=self.index,
            use_qk_l2norm_in_kernel=True, cu_seqlens=self.ends,
            is_kda=self.point.case.family == "kda",
        )  # fmt: skip
        return out.view(self.point.batch, 1, *out.shape[-2:])


def _rings(point: Point, length: int, on: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    at, rows = point.case.layer, point.batch
    u = torch.zeros(rows, at.value_heads, length, at.value_dim, dtype=torch.bfloat16, device=on)
    k = torch.zeros(rows, at.key_heads, length, at.key_dim, dtype=torch.bfloat16, device=on)
    gate = at.gate_shape()
    return u, k, torch.zeros(rows, gate[0], length, *gate[1:], device=on)


class DeltaReplay:
    """A step that writes the state once per window and keeps corrected entries in a ring."""

    def __init__(self, update: Any, point: Point, state: Tensor, steps: int) -> None:  # noqa: ANN401
        self.update, self.point, self.state = update, point, state
        on = state.device
        self.u, self.k, self.g = _rings(point, point.window, on)
        self.index = torch.arange(point.batch, dtype=torch.int32, device=on)
        self.at = steps_of_rows(point.batch, steps, point.window).int().to(on)

    def load(self, inputs: Inputs) -> None:
        """Take inputs."""
        self.mixed, self.inputs = packed(inputs), inputs
        self.out = torch.full_like(inputs.v, torch.nan)

    def launch(self, step: int) -> Tensor:
        """Launch one step."""
        x, scale = self.inputs, self.point.case.layer.key_dim**-0.5
        self.update(
            self.mixed, x.a[:, 0], x.b[:, 0], x.a_log, x.bias, scale, self.state, self.u, self.k,
            self.g, self.out, self.index, self.at[step], use_qk_l2norm_in_kernel=True,
            is_kda=self.point.case.family == "kda",
        )  # fmt: skip
        return self.out


class BlockReplay:
    """A block of GDN that moves cursors instead of writing snapshots."""

    def __init__(self, update: Any, point: Point, state: Tensor, steps: int) -> None:  # noqa: ANN401
        self.update, self.point, self.state = update, point, state
        self.length, cycle = ring_length(point), verify_cycle(point)
        rows, at, on = point.batch, point.case.layer, state.device
        self.u, self.k, self.g = _rings(point, self.length, on)
        self.raw_v, self.raw_k = torch.zeros_like(self.u), torch.zeros_like(self.k)
        self.strength = torch.zeros(rows, at.value_heads, self.length, device=on)
        self.index = torch.arange(rows, dtype=torch.int32, device=on)
        self.ends = torch.arange(
            0, (rows + 1) * point.tokens, point.tokens, dtype=torch.int32, device=on
        )
        where = steps_of_rows(rows, steps, cycle.period)
        filled, folds = torch.tensor(cycle.filled)[where], torch.tensor(cycle.folds)[where]
        folded = (filled * folds).cumsum(0) - filled * folds
        self.filled, self.folds = filled.int().to(on), folds.to(torch.int8).to(on)
        self.base = (folded % self.length).int().to(on)

    def load(self, inputs: Inputs) -> None:
        """Take inputs, blocks laid end to end."""
        names = ("q", "k", "v", "a", "b")
        self.tokens = [getattr(inputs, name).flatten(0, 1) for name in names]
        self.inputs, self.out = inputs, torch.full_like(self.tokens[2], torch.nan)

    def launch(self, step: int) -> Tensor:
        """Launch one step."""
        self.update(
            *self.tokens, self.inputs.a_log, self.inputs.bias, self.state, self.u, self.k, self.g,
            self.raw_v, self.raw_k, self.strength, self.out, self.ends, self.index, self.index,
            self.filled[step], self.base[step], self.folds[step], self.length, self.point.tokens,
            null_block_id=-1,
        )  # fmt: skip
        return self.out.view(self.point.batch, self.point.tokens, *self.out.shape[1:])


def ring_length(point: Point) -> int:
    """Entries of the circular ring: the window and a block, rounded up to a power of two."""
    return 1 << (point.window + point.tokens - 1).bit_length()


def verify_cycle(point: Point) -> Cycle:
    """Return how full the ring is at every step of the steady cycle."""
    return block_cycle(ring_length(point), point.tokens, point.kept)


@dataclass(frozen=True)
class SglangArm:
    """One function of SGLang with one state format; attributes as in ``vllm.VllmArm``."""

    label: str
    make: Any
    update: Any
    families: tuple[str, ...]
    state: str
    kind: Kind = Kind.STANDARD
    blocks: bool = False
    depth: str = "full"
    tolerance: float = 1e-2

    @property
    def name(self) -> str:
        """Shown in the table."""
        return f"sglang {self.label} {self.state}"

    def refuses(self, point: Point) -> str:
        """One kernel serves blocks, the others one token."""
        if point.case.family not in self.families:
            return f"serves {', '.join(self.families)}"
        if (point.tokens > 1) != self.blocks:
            return "serves blocks" if self.blocks else "serves one token"
        return ""

    def period(self, point: Point) -> int:
        """Steps of a fold cycle."""
        if self.kind is Kind.STANDARD:
            return 1
        return verify_cycle(point).period if self.blocks else point.window

    def prepare(self, point: Point, device: torch.device, seed: int | None, steps: int) -> StateSet:
        """Allocate one state set."""
        state = new_states(point, point.batch, STATES[self.state], device, seed)
        made: StateSet = self.make(self.update, point, state, steps)
        return made

    def traffic(self, point: Point) -> Traffic:
        """Return the bytes of an average layer-step."""
        if self.kind is Kind.STANDARD:
            return standard_traffic(point, self.state)
        keys, values, gate = point.entry_elements
        entry, size = 2 * keys + 2 * values + 4 * gate, point.state_elements
        size *= STATES[self.state].itemsize
        if not self.blocks:
            cycle = decode_cycle(point.window)
            return cycle.traffic(point, size, entry, (cycle.period - 1) / cycle.period)
        # raw entries are written beside the corrected ones, and a fold reads those alone
        strengths = point.batch * point.case.layer.value_heads
        raw = 2 * keys + 2 * values + 4 * strengths
        cycle = verify_cycle(point)
        return cycle.traffic(point, size, entry, point.tokens * (entry + raw) / entry)


def arms() -> list[Arm]:
    """Return the arms.

    Raises:
        ImportError: The package is not installed.
    """
    bare(
        "sglang", "sglang.kernels", "sglang.kernels.ops", "sglang.kernels.ops.attention", LINEAR,
        "sglang.kernels.ops.mamba", MAMBA,
    )  # fmt: skip
    is_cuda = torch.cuda.is_available()
    major = torch.cuda.get_device_capability()[0] if is_cuda else 0
    # as the package decides them on an NVIDIA device
    stand_in("sglang.kernels.jit.utils", is_arch_support_pdl=lambda: major >= 9)
    stand_in(
        "sglang.srt.utils",
        get_device_sm=lambda: 10 * major,
        is_cuda=lambda: is_cuda,
        is_hip=lambda: False,
        is_gfx95_supported=lambda: False,
        is_sm90_supported=lambda: major == 9,
    )
    stand_in("sglang.kernels.ops.attention.fla.utils", is_tf32_supported=major >= 8)
    ssm = load(f"{MAMBA}.mamba_ssm").selective_state_update
    delta = load(f"{LINEAR}.fused_sigmoid_gating_recurrent").fused_sigmoid_gating_delta_rule_update
    replay = load(f"{LINEAR}.fused_recurrent_linear_replayssm")
    replay = replay.fused_recurrent_linear_replayssm_decode
    block = load(f"{LINEAR}.gdn_replayssm_spec_decode").gdn_replayssm_spec_decode
    both, gdn = ("gdn", "kda"), ("gdn",)
    found: list[Arm] = []
    for state in STATES:
        found += [
            SglangArm("standard", MambaUpdate, ssm, ("mamba2",), state),
            SglangArm("standard gates", DeltaUpdate, delta, both, state),
            SglangArm("replay", DeltaReplay, replay, both, state, Kind.REPLAY),
            SglangArm("replay block", BlockReplay, block, gdn, state, Kind.REPLAY, blocks=True),
        ]
    return found
