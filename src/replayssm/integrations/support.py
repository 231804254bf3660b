"""``replayssm.support(model)``: what of a model is served, how, and why not."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from replayssm.errors import ContractError, UnsupportedError
from replayssm.models.registry import find_mixers
from replayssm.types import Format, ReadDepth

if TYPE_CHECKING:
    from replayssm.models.registry import Mixer, Refused

RECURRENT_TYPES = ("linear_attention", "hybrid", "hybrid_sliding", "mamba")
LIMITS = (
    "inference only: cached decode steps are not differentiable",
    "torch.compile breaks its graph at every recurrent layer; fullgraph=True cannot work",
    "packed sequences (cu_seqlens) are refused on a live cache",
    "cache.crop takes back at most keep tokens, or 20 on a cache that records its past; the "
    "standard path takes nothing back",
    "assisted generation serves one sequence at a time, as transformers does",
    "all recurrent layers on one device, and one dtype as long as the model is enabled",
)


@dataclass(frozen=True, slots=True)
class LayerSupport:
    """One recurrent layer.

    Attributes:
        index: Index of its cache layer, -1 where it has none.
        name: Module path.
        mixer: Class name.
        served: Whether an adapter serves it.
        family: ``mamba2``, ``gdn``, ``kda``, or empty.
        write: ``additive`` or ``delta``, or empty.
        decay: ``scalar`` or ``channel``, or empty.
        key_heads: H.
        value_heads: HV.
        heads_per_key: Value heads that share a key head.
        key_dim: K.
        value_dim: V.
        model_layout: State layout in transformers; the pool's is ``[S, HV, V, K]``.
        reason: Why it is not served, or empty.
    """

    index: int
    name: str
    mixer: str
    served: bool
    family: str = ""
    write: str = ""
    decay: str = ""
    key_heads: int = 0
    value_heads: int = 0
    heads_per_key: int = 0
    key_dim: int = 0
    value_dim: int = 0
    model_layout: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class DraftHead:
    """The model's multi-token-prediction head.

    Attributes:
        status: ``absent`` or ``refused``.
        reason: Why.
    """

    status: str
    reason: str


@dataclass(frozen=True, slots=True)
class Support:
    """The compatibility matrix of one model.

    Attributes:
        model: Class or configuration name.
        transformers: Version.
        supported: Whether ``enable`` would accept it.
        layers: Recurrent layers, one row each.
        recurrent_layers: Their number.
        served_layers: Those that an adapter serves.
        other_layers: Layers without a recurrent state (attention, MLP, short convolution).
        state_elements: Elements of one sequence's recurrent state over all served layers.
        paths: Paths of ``enable``.
        states: State formats by path.
        reads: Read depths on the replay path.
        draft_head: Multi-token prediction.
        reasons: Why the model is refused; empty when supported.
        limits: What an enabled model cannot do.
    """

    model: str
    transformers: str
    supported: bool
    layers: tuple[LayerSupport, ...]
    recurrent_layers: int
    served_layers: int
    other_layers: int
    state_elements: int
    paths: tuple[str, ...]
    states: dict[str, tuple[str, ...]]
    reads: tuple[str, ...]
    draft_head: DraftHead
    reasons: tuple[str, ...]
    limits: tuple[str, ...]

    def __str__(self) -> str:
        """Return the matrix as lines of text, for a terminal."""
        verdict = "served" if self.supported else "refused"
        lines = [f"{self.model}, transformers {self.transformers}: {verdict}"]
        lines += [f"  because: {reason}" for reason in self.reasons]
        for at in self.layers:
            what = f"refused: {at.reason}"
            if at.served:
                what = (
                    f"{at.family}, {at.write} write, {at.decay} decay, {at.value_heads} value heads"
                    f" of {at.value_dim} x {at.key_dim}, {at.key_heads} key heads"
                )
            lines.append(f"  layer {at.index:>3}  {at.mixer}: {what}")
        lines.append(f"  other layers: {self.other_layers}")
        lines += [f"  {path}: {', '.join(names)}" for path, names in self.states.items()]
        lines.append(f"  draft head {self.draft_head.status}: {self.draft_head.reason}")
        lines += [f"  limit: {limit}" for limit in self.limits]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return plain dictionaries, lists and numbers, ready for JSON."""
        return asdict(self)


def support(model_or_config: Any) -> Support:  # noqa: ANN401 - a transformers model or config
    """Report which layers of a model are served, how, and why not.

    Args:
        model_or_config: A loaded model, or its configuration (built on the meta device: no memory,
            no weights).

    Raises:
        ContractError: It is neither.
    """
    import transformers

    model = _as_model(model_or_config)
    mixers, refused = find_mixers(model)
    rows = sorted(
        [*map(_served_row, mixers), *map(_refused_row, refused)], key=lambda row: row.index
    )
    reasons = _reasons(model, mixers, refused, check_device=model is model_or_config)
    total = _num_layers(model)
    return Support(
        model=type(model_or_config).__name__,
        transformers=transformers.__version__,
        supported=not reasons,
        layers=tuple(rows),
        recurrent_layers=len(rows),
        served_layers=len(mixers),
        other_layers=max(0, total - len({row.index for row in rows if row.index >= 0})),
        state_elements=sum(m.spec.state_elements for m in mixers),
        paths=("replay", "standard"),
        states={
            "replay": tuple(f.value for f in Format),
            "standard": (Format.F32.value, Format.BF16.value),
        },
        reads=tuple(d.value for d in ReadDepth),
        draft_head=_draft_head(model),
        reasons=reasons,
        limits=LIMITS,
    )


def require_supported(model: nn.Module) -> tuple[Mixer, ...]:
    """Return the mixers of a model that can be enabled.

    Raises:
        ContractError: It is not a transformers model.
        UnsupportedError: It cannot be enabled; the message lists every reason.
    """
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        raise ContractError("model", "a transformers model", type(model).__name__)
    mixers, refused = find_mixers(model)
    reasons = _reasons(model, mixers, refused, check_device=True)
    if reasons:
        raise UnsupportedError(f"{type(model).__name__}: {'; '.join(reasons)}")
    return mixers


def _as_model(given: Any) -> nn.Module:  # noqa: ANN401
    from transformers import AutoModelForCausalLM, PreTrainedConfig

    if isinstance(given, nn.Module) and hasattr(given, "config"):
        return given
    if not isinstance(given, PreTrainedConfig):
        raise ContractError(
            "model_or_config", "a transformers model or configuration", type(given).__name__
        )
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(given)
    return model


def _text_config(model: nn.Module) -> Any:  # noqa: ANN401
    at: Any = model
    return at.config.get_text_config()


def _num_layers(model: nn.Module) -> int:
    return int(getattr(_text_config(model), "num_hidden_layers", 0) or 0)


def _reasons(
    model: nn.Module, mixers: tuple[Mixer, ...], refused: tuple[Refused, ...], *, check_device: bool
) -> tuple[str, ...]:
    reasons = []
    if isinstance(model, torch._dynamo.OptimizedModule):
        reasons.append("torch.compile: enable the model it was compiled from, uncompiled")
    by_reason: dict[str, list[str]] = {}
    for layer in refused:
        by_reason.setdefault(f"{layer.kind} ({layer.reason})", []).append(layer.name)
    reasons += [f"{len(names)} layers of {what}" for what, names in by_reason.items()]
    if not mixers and not refused:
        reasons.append("no recurrent layer: nothing to serve")
    unknown = _unknown_layers(model, mixers, refused)
    if unknown:
        reasons.append(f"cache layers {unknown} are recurrent but no adapter knows their mixers")
    if getattr(model, "use_kernels", False):
        reasons.append("hub kernels (use_kernels=True) bypass the hooks; load without them")
    if check_device and mixers:
        devices = {p.device for m in mixers for p in m.module.parameters()}
        if any(device.type == "meta" for device in devices):
            reasons.append("weights on the meta device or offloaded; load them on one device")
        elif len(devices) > 1:
            names = sorted(map(str, devices))
            reasons.append(f"recurrent layers on {names}; one device is served (no device_map)")
    return tuple(reasons)


def _unknown_layers(
    model: nn.Module, mixers: tuple[Mixer, ...], refused: tuple[Refused, ...]
) -> list[int]:
    types = getattr(_text_config(model), "layer_types", None) or ()
    known = {m.layer_idx for m in mixers} | {r.layer_idx for r in refused}
    if any(r.layer_idx < 0 for r in refused):
        return []
    return [i for i, kind in enumerate(types) if kind in RECURRENT_TYPES and i not in known]


def _draft_head(model: nn.Module) -> DraftHead:
    config, at = _text_config(model), model
    counts = ("num_mtp_layers", "mtp_num_hidden_layers", "num_nextn_predict_layers")
    layers = max(int(getattr(config, name, 0) or 0) for name in counts)
    ignored: Any = getattr(at, "_keys_to_ignore_on_load_unexpected", None) or ()
    if layers:
        return DraftHead(
            "refused",
            f"the checkpoint has {layers} multi-token-prediction layers; no drafter runs them yet",
        )
    if any("mtp" in key for key in ignored):
        return DraftHead(
            "refused",
            "the configuration names no multi-token-prediction layer, and transformers drops "
            "such weights of this architecture on load",
        )
    return DraftHead("absent", "this architecture has no multi-token-prediction layers")


def _served_row(mixer: Mixer) -> LayerSupport:
    spec = mixer.spec
    return LayerSupport(
        index=mixer.layer_idx,
        name=mixer.name,
        mixer=type(mixer.module).__name__,
        served=True,
        family=mixer.adapter.family,
        write=spec.write.value,
        decay=spec.decay.value,
        key_heads=spec.key_heads,
        value_heads=spec.value_heads,
        heads_per_key=spec.heads_per_key,
        key_dim=spec.key_dim,
        value_dim=spec.value_dim,
        model_layout=mixer.adapter.layout,
    )


def _refused_row(layer: Refused) -> LayerSupport:
    return LayerSupport(layer.layer_idx, layer.name, layer.kind, served=False, reason=layer.reason)
