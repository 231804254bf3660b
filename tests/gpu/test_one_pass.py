"""One pass over the state on Hopper: its checkpoints know nothing but the tokens."""

from __future__ import annotations

from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch

from replayssm.ring import RingSpec
from replayssm.state import StatePool
from replayssm.storage import StorageSpec
from replayssm.testing.factories import make_block, make_state
from replayssm.types import Block, Decay, Format, Impl, LayerSpec, Write

LAYER = LayerSpec(Write.DELTA, Decay.SCALAR, 2, 8, key_dim=128, value_dim=128)
RING = RingSpec(16, max_block=9)
STARTS = (0, 5, 11)  # positions that three sequences are admitted at
STREAM = 63  # tokens that they commit


@pytest.fixture
def hopper(device: torch.device) -> torch.device:
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("needs a Hopper GPU")
    return device


@dataclass(frozen=True)
class Drive:
    """How a stream of tokens is fed: blocks of ``(tokens, kept)``, which rows, and folds between.

    ``parts``: programs that share a key head; 0 leaves it to the table.
    """

    blocks: list[tuple[int, int]]
    rows: tuple[int, ...] = (0, 1, 2)
    folds_between: bool = False
    parts: int = 0


def tokens_of(seed: int) -> Block:
    return make_block(LAYER, len(STARTS), STREAM + RING.max_block, seed=seed)


def checkpoints(fmt: Format, drive: Drive, device: torch.device) -> torch.Tensor:
    """Return the rows' checkpoints; tokens that are not kept are those of another stream."""
    from replayssm.ops.triton import one_pass

    pool = StatePool(
        [LAYER], 3, state=fmt, ring=RING, ring_dtype=torch.bfloat16, device=device,
        impl=Impl.TRITON,
    )  # fmt: skip
    refs = [
        pool.admit_([make_state(LAYER, seed=i).to(device)], position=STARTS[i]) for i in drive.rows
    ]
    right, wrong = tokens_of(1), tokens_of(2)
    how = one_pass.OnePass(1, drive.parts, 168)
    chosen = patch.object(one_pass, "choose", lambda *_: how) if drive.parts else None
    done = 0
    if chosen:
        chosen.start()
    for tokens, kept in drive.blocks:
        block = []
        for name in ("q", "k", "v", "g", "w"):
            part = getattr(wrong, name)[list(drive.rows), done : done + tokens].clone()
            part[:, :kept] = getattr(right, name)[list(drive.rows), done : done + kept]
            dtype = torch.bfloat16 if name in "qkv" else torch.float32
            block.append(part.to(device, dtype).contiguous())
        ticket = pool.begin(refs, tokens)
        pool.step_(ticket, 0, Block(*block))
        pool.commit_(ticket, kept)
        done += kept
        if drive.folds_between:
            pool.fold_(refs)
    pool.fold_(refs)
    if chosen:
        chosen.stop()
    return pool.stores[0].high[[r.slot for r in refs]].cpu()


REJECTED = [(4, (1, 4, 2, 3)[i % 4]) for i in range(25)] + [(4, 2)]
WAYS = {
    "blocks of four": Drive([(4, 4)] * 15 + [(4, 3)]),
    "blocks of eight": Drive([(8, 8)] * 7 + [(8, 7)]),
    "blocks of nine, read by the pull-back": Drive([(9, 9)] * 7),
    "rejected tokens": Drive(REJECTED),
    "folds between": Drive([(1, 1)] * STREAM, folds_between=True),
    "shared key heads": Drive([(1, 1)] * STREAM, parts=4),
    "shared key heads, blocks": Drive([(4, 4)] * 15 + [(4, 3)], parts=8),
}


@pytest.mark.parametrize("fmt", [Format.BF16, Format.F32])
@pytest.mark.parametrize("way", WAYS)
def test_a_checkpoint_is_a_function_of_the_tokens(
    fmt: Format, way: str, hopper: torch.device
) -> None:
    assert sum(kept for _, kept in WAYS[way].blocks) == STREAM
    single = checkpoints(fmt, Drive([(1, 1)] * STREAM), hopper)
    assert torch.equal(checkpoints(fmt, WAYS[way], hopper), single)


@pytest.mark.parametrize("fmt", [Format.BF16, Format.F32])
def test_a_row_does_not_know_the_others(fmt: Format, hopper: torch.device) -> None:
    blocks = WAYS["blocks of four"].blocks
    together = checkpoints(fmt, Drive(blocks), hopper)
    for row in range(len(STARTS)):
        assert torch.equal(checkpoints(fmt, Drive(blocks, (row,)), hopper)[0], together[row])


def test_what_the_kernel_cannot_fold_is_not_folded_here() -> None:
    pytest.importorskip("triton")
    from replayssm.ops.triton.one_pass import serves

    def spec(ring: RingSpec = RING, fmt: str = "bf16", **other: object) -> StorageSpec:
        at = {"write": Write.DELTA, "decay": Decay.SCALAR, "key_heads": 2, "value_heads": 8,
              "key_dim": 128, "value_dim": 128} | other  # fmt: skip
        return StorageSpec(LayerSpec(**at), Format(fmt), ring, torch.bfloat16)

    assert serves(spec())
    assert serves(spec(RingSpec(8, keep=3, max_block=5)))
    for ring in (RingSpec(17), RingSpec(8, max_block=9), RingSpec(16, keep=1, max_block=9),
                 RingSpec(16, tiles=2)):  # fmt: skip
        assert not serves(spec(ring))
    for other in ({"key_dim": 64}, {"value_dim": 96}, {"value_heads": 6}, {"decay": Decay.CHANNEL},
                  {"write": Write.ADDITIVE}):  # fmt: skip
        assert not serves(spec(**other))
