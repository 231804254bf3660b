"""vLLM's Triton kernels: standard steps, a snapshot after every drafted token, Mamba-2 replay.

Slot 0 is the null block of every pool. Kernel files only are loaded; launch shapes are the ones
that vLLM ships for this device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from gpu.arms import (
    STATES,
    Kind,
    decode_cycle,
    new_states,
    snapshot_traffic,
    standard_traffic,
    steps_of_rows,
)
from gpu.peers.common import gates, mamba, packed
from gpu.peers.loading import bare, load, stand_in

if TYPE_CHECKING:
    from torch import Tensor

    from gpu.arms import Arm, StateSet, Traffic
    from gpu.cases import Inputs, Point

MAMBA = "vllm.model_executor.layers.mamba.ops"
DELTA = "vllm.third_party.flash_linear_attention.ops"


class MambaUpdate:
    """A standard step, or a block with a snapshot after every token."""

    def __init__(self, update: Any, point: Point, pool: Tensor) -> None:  # noqa: ANN401
        self.update, self.point, self.pool = update, point, pool
        rows, t, on = point.batch, point.tokens, pool.device
        slots = torch.arange(1, rows * t + 1, dtype=torch.int32, device=on)
        self.where: dict[str, Any] = {"state_batch_indices": slots}
        if t > 1:
            self.where = {
                "state_batch_indices": slots.view(rows, t),
                "num_accepted_tokens": torch.full(
                    (rows,), point.kept, dtype=torch.int32, device=on
                ),
                "cu_seqlens": torch.arange(0, rows * t + 1, t, dtype=torch.int32, device=on),
            }

    def load(self, inputs: Inputs) -> None:
        """Take inputs, blocks laid end to end."""
        x = mamba(self.point, inputs)
        tokens = (x.x, x.dt, x.b, x.c)
        self.x, self.dt, self.b, self.c = (t.flatten(0, 1) for t in tokens)
        # flatten would copy an expanded view, and the kernel looks at its strides
        self.dt = inputs.a.flatten(0, 1)[..., None].expand_as(self.x)
        self.weights, self.out = x, torch.full_like(self.x, torch.nan)

    def launch(self, step: int) -> Tensor:
        """Launch one step."""
        w = self.weights
        self.update(
            self.pool, self.x, self.dt, w.decay, self.b, self.c, w.skip, w.bias,
            dt_softplus=True, out=self.out, **self.where,
        )  # fmt: skip
        return self.out.view(self.point.batch, self.point.tokens, *self.out.shape[1:])


class MambaReplay:
    """A step that writes the state once per window."""

    def __init__(self, update: Any, point: Point, pool: Tensor, steps: int) -> None:  # noqa: ANN401
        self.update, self.point, self.pool = update, point, pool
        at, on, length = point.case.layer, pool.device, point.window
        slots, h, hv = len(pool), at.key_heads, at.value_heads
        self.x = torch.zeros(slots, hv, length, at.value_dim, dtype=torch.bfloat16, device=on)
        self.b = torch.zeros(slots, h, length, at.key_dim, dtype=torch.bfloat16, device=on)
        self.dt = torch.zeros(slots, hv, length, device=on)
        self.dots = torch.zeros(point.batch, h, length, device=on)
        self.index = torch.arange(1, slots, dtype=torch.int32, device=on)
        self.at = steps_of_rows(point.batch, steps, length).int().to(on)
        self.folds = (self.at == length - 1).to(torch.int8)

    def load(self, inputs: Inputs) -> None:
        """Take inputs."""
        x = mamba(self.point, inputs)
        self.token = (x.x[:, 0], x.dt[:, 0], x.decay, x.b[:, 0], x.c[:, 0], x.skip, x.bias)
        self.out = torch.full_like(self.token[0], torch.nan)

    def launch(self, step: int) -> Tensor:
        """Launch one step."""
        self.update(
            self.pool, *self.token, dt_softplus=True, x_cache=self.x, dt_cache=self.dt,
            B_cache=self.b, bc_pre=self.dots, write_pos=self.at[step], is_flush=self.folds[step],
            max_cache_len=self.point.window, state_batch_indices=self.index, out=self.out,
        )  # fmt: skip
        return self.out.unsqueeze(1)


class DeltaUpdate:
    """A standard step or a block with snapshots, gates formed in the kernel."""

    def __init__(self, update: Any, point: Point, pool: Tensor) -> None:  # noqa: ANN401
        self.update, self.point, self.pool = update, point, pool
        rows, t, on = point.batch, point.tokens, pool.device
        self.index = torch.arange(1, rows * t + 1, dtype=torch.int32, device=on)
        self.ends = torch.arange(0, rows * t + 1, t, dtype=torch.int32, device=on)
        self.kept = None
        if t > 1:
            self.index = self.index.view(rows, t)
            self.kept = torch.full((rows,), point.kept, dtype=torch.int32, device=on)

    def load(self, inputs: Inputs) -> None:
        """Take inputs, blocks laid end to end."""
        flat = (t.flatten(0, 1).unsqueeze(0) for t in (inputs.q, inputs.k, inputs.v))
        self.tokens = tuple(flat)
        self.gates = {
            "A_log": inputs.a_log,
            "a": inputs.a.flatten(0, 1),
            "b": inputs.b.flatten(0, 1),
            "dt_bias": inputs.bias,
        }

    def launch(self, step: int) -> Tensor:
        """Launch one step; the function allocates the outputs."""
        q, k, v = self.tokens
        out, _ = self.update(
            **self.gates, q=q, k=k, v=v, initial_state=self.pool, inplace_final_state=True,
            cu_seqlens=self.ends, ssm_state_indices=self.index, num_accepted_tokens=self.kept,
            use_qk_l2norm_in_kernel=True, is_kda=self.point.case.family == "kda",
        )  # fmt: skip
        return out.view(self.point.batch, self.point.tokens, *out.shape[-2:])


class ChannelUpdate(DeltaUpdate):
    """The same with the narrow tile of vLLM's KDA layer, which takes gates ready made."""

    def load(self, inputs: Inputs) -> None:
        """Take inputs; gates are formed here, not in the timed step."""
        super().load(inputs)
        decay, strength = gates(inputs)
        self.decay = decay.flatten(0, 1).unsqueeze(0)
        self.strength = strength.flatten(0, 1).unsqueeze(0)

    def launch(self, step: int) -> Tensor:
        """Launch one step; the function allocates the outputs."""
        q, k, v = self.tokens
        out, _ = self.update(
            q, k, v, self.decay, self.strength, k.shape[-1] ** -0.5, self.pool,
            cu_seqlens=self.ends, ssm_state_indices=self.index, num_accepted_tokens=self.kept,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        return out.view(self.point.batch, self.point.tokens, *out.shape[-2:])


class PackedUpdate:
    """The decode kernel that takes q, k and v as the convolution leaves them."""

    def __init__(self, update: Any, point: Point, pool: Tensor) -> None:  # noqa: ANN401
        self.update, self.point, self.pool = update, point, pool
        self.index = torch.arange(1, point.batch + 1, dtype=torch.int32, device=pool.device)

    def load(self, inputs: Inputs) -> None:
        """Take inputs."""
        self.mixed, self.inputs = packed(inputs), inputs
        self.out = torch.full_like(inputs.v, torch.nan)

    def launch(self, step: int) -> Tensor:
        """Launch one step."""
        x, scale = self.inputs, self.point.case.layer.key_dim**-0.5
        self.update(
            self.mixed, x.a[:, 0], x.b[:, 0], x.a_log, x.bias, scale, self.pool, self.out,
            self.index, use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        return self.out


@dataclass(frozen=True)
class VllmArm:
    """One function of vLLM with one state format.

    Attributes:
        label: Shown in the table, with the state.
        make: Builds a state set from the function, the point and a pool of states.
        update: The function.
        families: Case families that it serves.
    """

    label: str
    make: Any
    update: Any
    families: tuple[str, ...]
    state: str
    kind: Kind = Kind.STANDARD
    depth: str = "full"
    tolerance: float = 1e-2

    @property
    def name(self) -> str:
        """Shown in the table."""
        return f"vllm {self.label} {self.state}"

    def refuses(self, point: Point) -> str:
        """Snapshots serve blocks, the others one token."""
        if point.case.family not in self.families:
            return f"serves {', '.join(self.families)}"
        if (point.tokens > 1) != (self.kind is Kind.SNAPSHOT):
            return "serves blocks" if self.kind is Kind.SNAPSHOT else "serves one token"
        return ""

    def period(self, point: Point) -> int:
        """A window for replay, otherwise 1."""
        return point.window if self.kind is Kind.REPLAY else 1

    def prepare(self, point: Point, device: torch.device, seed: int | None, steps: int) -> StateSet:
        """Allocate one state set."""
        slots = point.batch * (point.tokens if self.kind is Kind.SNAPSHOT else 1) + 1
        pool = new_states(point, slots, STATES[self.state], device, seed)
        if self.kind is Kind.REPLAY:
            made: StateSet = self.make(self.update, point, pool, steps)
        else:
            made = self.make(self.update, point, pool)
        return made

    def traffic(self, point: Point) -> Traffic:
        """Return the bytes of an average layer-step."""
        if self.kind is Kind.SNAPSHOT:
            return snapshot_traffic(point, self.state)
        if self.kind is Kind.STANDARD:
            return standard_traffic(point, self.state)
        keys, values, steps = point.entry_elements
        entry, cycle = 2 * keys + 2 * values + 4 * steps, decode_cycle(point.window)
        size = point.state_elements * STATES[self.state].itemsize
        return cycle.traffic(point, size, entry, (cycle.period - 1) / cycle.period)


class Log:
    """vLLM's logger, silent."""

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return lambda *args, **kwargs: None


class Platform:
    """What the kernel files ask of vLLM's platform: an NVIDIA device, not Blackwell."""

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return lambda *args, **kwargs: name in {"is_cuda", "is_cuda_alike"}


def device_file_name() -> str:
    """Return the device name as vLLM writes it in the names of its launch tables."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return name.replace(" ", "_")


def _stand_ins() -> None:
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice

    stand_in("vllm.envs", VLLM_TUNED_CONFIG_FOLDER=None)
    stand_in("vllm._custom_ops")
    stand_in("vllm.logger", init_logger=lambda name: Log())
    stand_in("vllm.platforms", current_platform=Platform())
    stand_in("vllm.triton_utils", HAS_TRITON=True, tl=tl, triton=triton, tldevice=libdevice)
    stand_in("vllm.utils.platform_utils", get_device_name_as_file_name=device_file_name)
    stand_in("vllm.v1.attention.backends.utils", NULL_BLOCK_ID=0)


def _channel_update(kernel: Any) -> Any:  # noqa: ANN401
    # the layer's own launch (its module needs the whole engine): 8 value rows and one warp
    def update(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, pool: Tensor,
        cu_seqlens: Tensor, ssm_state_indices: Tensor, num_accepted_tokens: Tensor | None,
        use_qk_l2norm_in_kernel: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        b, t, h, k_dim = k.shape
        hv, v_dim, out = v.shape[2], v.shape[3], torch.empty_like(v)
        strides = ssm_state_indices.stride()
        kernel[(1, -(-v_dim // 8), (len(cu_seqlens) - 1) * hv)](
            q=q, k=k, v=v, g=g, beta=beta, o=out, h0=pool, ht=pool, cu_seqlens=cu_seqlens,
            ssm_state_indices=ssm_state_indices, num_accepted_tokens=num_accepted_tokens,
            scale=scale, N=len(cu_seqlens) - 1, T=t, B=b, H=h, HV=hv, K=k_dim, V=v_dim, BK=k_dim,
            BV=8, stride_init_state_token=pool.stride(0), stride_final_state_token=pool.stride(0),
            stride_indices_seq=strides[0], stride_indices_tok=strides[1] if len(strides) > 1 else 1,
            IS_BETA_HEADWISE=False, USE_QK_L2NORM_IN_KERNEL=use_qk_l2norm_in_kernel,
            INPLACE_FINAL_STATE=True, IS_KDA=True, num_warps=1, num_stages=3,
        )  # fmt: skip
        return out, pool

    return update


def arms() -> list[Arm]:
    """Return the arms.

    Raises:
        ImportError: The package is not installed.
    """
    bare(
        "vllm", "vllm.model_executor", "vllm.model_executor.layers",
        "vllm.model_executor.layers.mamba", MAMBA, "vllm.third_party",
        "vllm.third_party.flash_linear_attention", DELTA,
    )  # fmt: skip
    _stand_ins()
    stand_in(f"{DELTA}.utils", is_gather_supported=True)
    ssm = load(f"{MAMBA}.mamba_ssm").selective_state_update
    replay = load(f"{MAMBA}.selective_state_update_replayssm_output_only")
    replay = replay.selective_state_update_replayssm_output_only
    delta = load(f"{DELTA}.fused_sigmoid_gating").fused_sigmoid_gating_delta_rule_update
    recurrent = load(f"{DELTA}.fused_recurrent")
    channel = _channel_update(recurrent.fused_recurrent_gated_delta_rule_fwd_kernel)
    one = recurrent.fused_recurrent_gated_delta_rule_packed_decode
    mamba2, both, snapshot = ("mamba2",), ("gdn", "kda"), Kind.SNAPSHOT
    found: list[Arm] = []
    for state in STATES:
        found += [
            VllmArm("standard", MambaUpdate, ssm, mamba2, state),
            VllmArm("standard gates", DeltaUpdate, delta, both, state),
            VllmArm("standard packed", PackedUpdate, one, ("gdn",), state),
            VllmArm("standard narrow", ChannelUpdate, channel, ("kda",), state),
            VllmArm("snapshots", MambaUpdate, ssm, mamba2, state, snapshot),
            # of several KDA tokens this kernel would read wrong gates
            VllmArm("snapshots gates", DeltaUpdate, delta, ("gdn",), state, snapshot),
            VllmArm("snapshots narrow", ChannelUpdate, channel, ("kda",), state, snapshot),
            VllmArm("replay", MambaReplay, replay, mamba2, state, Kind.REPLAY),
        ]
    return found
