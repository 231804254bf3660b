"""A request in flight as one value: what a swap keeps and a move sends."""

from __future__ import annotations

import io
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from replayssm.engine.request import Request, Route, Sampling
from replayssm.engine.standard import StandardImage
from replayssm.errors import ContractError
from replayssm.ring import RingSpec
from replayssm.storage import StorageSpec
from replayssm.transfer import SlotImage
from replayssm.types import ConvSpec, LayerSpec

if TYPE_CHECKING:
    from torch import Tensor

SCHEMA = "replayssm.request/1"


@dataclass(frozen=True, slots=True)
class RequestImage:
    """Everything that a request needs to go on elsewhere with the same bits.

    Pickling goes through :meth:`to_bytes`.

    Attributes:
        request: What was asked for.
        route: How it is served.
        tokens: Prompt and emitted tokens.
        position: Tokens in the state.
        slot: Its recurrent state; None before its first forward.
        kv: Keys and values in sight, ``[heads, n, dim]``, in order of position.
        rng: State of its generator; None for a greedy request.
        retries: Forwards of it that failed.
    """

    request: Request
    route: Route
    tokens: tuple[int, ...]
    position: int
    slot: SlotImage | StandardImage | None
    kv: tuple[Tensor, ...]
    rng: dict[str, Any] | None
    retries: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(x.nbytes for x in self._tensors().values())

    def to_bytes(self) -> bytes:
        """Return the image as one self-describing blob."""
        fields: dict[str, Any] = {
            "schema": SCHEMA,
            "request": {**asdict(self.request), "route": None},
            "asked": None if self.request.route is None else self.request.route.to_dict(),
            "route": self.route.to_dict(),
            "tokens": list(self.tokens),
            "position": self.position,
            "rng": self.rng,
            "retries": self.retries,
            "slot": self._slot_fields(),
        }
        blob = io.BytesIO()
        torch.save({"fields": json.dumps(fields), "tensors": self._tensors()}, blob)
        return blob.getvalue()

    @classmethod
    def from_bytes(cls, blob: bytes) -> RequestImage:
        """Return the image that :meth:`to_bytes` wrote; nothing in the blob is executed.

        Raises:
            ContractError: The blob has another schema.
        """
        held = torch.load(io.BytesIO(blob), weights_only=True)
        fields = json.loads(held["fields"])
        if fields["schema"] != SCHEMA:
            raise ContractError("image", f"schema {SCHEMA}", fields["schema"])
        asked = fields["asked"]
        request = {
            **fields["request"],
            "route": None if asked is None else Route.from_dict(asked),
            "sampling": Sampling(**fields["request"]["sampling"]),
        }
        tensors: dict[str, Tensor] = held["tensors"]
        kv = tuple(tensors[f"kv.{i}"] for i in range(_count(tensors, "kv.")))
        return cls(
            Request(**request),
            Route.from_dict(fields["route"]),
            tuple(fields["tokens"]),
            fields["position"],
            _read_slot(fields["slot"], tensors),
            kv,
            fields["rng"],
            fields["retries"],
        )

    def __reduce__(self) -> tuple[Any, tuple[bytes]]:
        # pickle knows no uint16 tensors, torch's own format does
        return RequestImage.from_bytes, (self.to_bytes(),)

    def _slot_fields(self) -> dict[str, Any] | None:
        slot = self.slot
        if slot is None:
            return None
        if isinstance(slot, StandardImage):
            return {"path": "standard", "committed": slot.committed, "layers": len(slot.states)}
        return {
            "path": "replay",
            "schema": slot.schema,
            "specs": [{**asdict(x), "ring_dtype": str(x.ring_dtype)} for x in slot.specs],
            "counts": [slot.base, slot.folded, slot.committed, slot.oldest],
        }

    def _tensors(self) -> dict[str, Tensor]:
        found = {f"kv.{i}": x for i, x in enumerate(self.kv)}
        if isinstance(self.slot, StandardImage):
            found |= {f"{i}.state": x for i, x in enumerate(self.slot.states)}
            windows = enumerate(self.slot.windows)
            found |= {f"{i}.window": x for i, x in windows if x is not None}
        elif self.slot is not None:
            for i, layer in enumerate(self.slot.layers):
                found |= {f"{i}.{name}": x for name, x in layer.items()}
        return found


def _read_slot(
    fields: dict[str, Any] | None, tensors: dict[str, Tensor]
) -> SlotImage | StandardImage | None:
    if fields is None:
        return None
    if fields["path"] == "standard":
        states = tuple(tensors[f"{i}.state"] for i in range(fields["layers"]))
        windows = tuple(tensors.get(f"{i}.window") for i in range(fields["layers"]))
        return StandardImage(fields["committed"], states, windows)
    specs = tuple(_read_spec(own) for own in fields["specs"])
    by_layer: list[dict[str, Tensor]] = [{} for _ in specs]
    for key, x in tensors.items():
        at, _, name = key.partition(".")
        if at != "kv":
            by_layer[int(at)][name] = x
    base, folded, committed, oldest = fields["counts"]
    layers = tuple(by_layer)
    return SlotImage(fields["schema"], specs, base, folded, committed, oldest, layers)


def _read_spec(fields: dict[str, Any]) -> StorageSpec:
    layer = dict(fields["layer"])
    if layer["conv"] is not None:
        layer["conv"] = ConvSpec(**layer["conv"])
    dtype = getattr(torch, fields["ring_dtype"].removeprefix("torch."))
    return StorageSpec(
        LayerSpec(**layer), fields["format"], RingSpec(**fields["ring"]), dtype, fields["exact"]
    )


def _count(tensors: dict[str, Tensor], prefix: str) -> int:
    return sum(name.startswith(prefix) for name in tensors)
