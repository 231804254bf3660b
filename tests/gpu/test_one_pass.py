"""One pass over the state on Hopper: its checkpoints know nothing but the tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch

from replayssm.errors import ContractError, UnsupportedError
from replayssm.ring import BlockPlan, RingSpec
from replayssm.state import StatePool
from replayssm.storage import StorageSpec, allocate
from replayssm.testing.factories import make_block, make_state
from replayssm.types import Block, Decay, Format, Impl, LayerSpec, ReadDepth, Write

DELTA = LayerSpec(Write.DELTA, Decay.SCALAR, 2, 8, key_dim=128, value_dim=128)
ADDITIVE = LayerSpec(Write.ADDITIVE, Decay.SCALAR, 2, 16, key_dim=128, value_dim=64)
RING = RingSpec(16, max_block=9)
STARTS = (0, 5, 11)  # positions that three sequences are admitted at
STREAM = 63  # tokens that they commit


def name_of(x: LayerSpec | Format) -> str:
    return x.write.value if isinstance(x, LayerSpec) else x.value


@pytest.fixture
def hopper(device: torch.device) -> torch.device:
    from replayssm.ops.triton.one_pass import is_known_gluon

    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("needs a Hopper GPU")
    if not is_known_gluon():
        pytest.skip("Gluon is another one in this version of Triton")
    return device


@dataclass(frozen=True)
class Drive:
    """How a stream of tokens is fed: blocks of ``(tokens, kept)``, which rows, and folds between.

    ``parts``: programs that share a key head; 0 leaves it to the size rule. ``spoiled``: a value
    and a key of the last token are NaN.
    """

    blocks: list[tuple[int, int]]
    rows: tuple[int, ...] = (0, 1, 2)
    folds_between: bool = False
    parts: int = 0
    depth: ReadDepth = ReadDepth.HIGH
    spoiled: bool = False


PLANES = ("high", "low", "row_scale", "columns")


def block_at(
    at: LayerSpec, drive: Drive, done: int, tokens: int, kept: int, device: torch.device
) -> Block:
    """Return a block whose tokens that are not kept are those of another stream."""
    right, wrong = (make_block(at, len(STARTS), STREAM + RING.max_block, seed=i) for i in (1, 2))
    fields, rows = [], list(drive.rows)
    for name in ("q", "k", "v", "g", "w"):
        part = getattr(wrong, name)[rows, done : done + tokens].clone()
        part[:, :kept] = getattr(right, name)[rows, done : done + kept]
        dtype = torch.bfloat16 if name in "qkv" else torch.float32
        fields.append(part.to(device, dtype).contiguous())
    return Block(*fields)


@contextmanager
def shared(at: LayerSpec, parts: int) -> Iterator[None]:
    """Have as many programs share a key head, or additive heads go by eights where few are."""
    from replayssm.ops.triton import additive_pass, one_pass

    if not parts:
        yield
    elif at is DELTA:
        with patch.object(one_pass, "programs_per_key_head", return_value=parts):
            yield
    else:
        with patch.object(additive_pass, "FILLED", 0):
            yield


def checkpoints(
    at: LayerSpec, fmt: Format, drive: Drive, device: torch.device
) -> dict[str, torch.Tensor]:
    """Return the planes of the rows' checkpoints."""
    pool = StatePool(
        [at], 3, state=fmt, ring=RING, ring_dtype=torch.bfloat16, device=device,
        impl=Impl.TRITON,
    )  # fmt: skip
    refs = [
        pool.admit_([make_state(at, seed=i).to(device)], position=STARTS[i]) for i in drive.rows
    ]
    done = 0
    with shared(at, drive.parts):
        for i, (tokens, kept) in enumerate(drive.blocks):
            block = block_at(at, drive, done, tokens, kept, device)
            if drive.spoiled and i + 1 == len(drive.blocks):
                block.k[:, -1, :, 3] = block.v[:, -1, :, 5] = torch.nan
            ticket = pool.begin(refs, tokens)
            pool.step_(ticket, 0, block, depth=drive.depth)
            pool.commit_(ticket, kept)
            done += kept
            if drive.folds_between:
                pool.fold_(refs)
        pool.fold_(refs)
    slots = [ref.slot for ref in refs]
    present = pool.stores[0].present()
    return {name: present[name].cpu()[slots] for name in PLANES if name in present}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    # bytes, so that a NaN is equal to itself
    return all(torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8)) for name in a)


REJECTED = [(4, (1, 4, 2, 3)[i % 4]) for i in range(25)] + [(4, 2)]
WAYS = {
    "blocks of four": Drive([(4, 4)] * 15 + [(4, 3)]),
    "blocks of eight": Drive([(8, 8)] * 7 + [(8, 7)]),
    "blocks of nine, read by the pull-back": Drive([(9, 9)] * 7),
    "rejected tokens": Drive(REJECTED),
    "folds between": Drive([(1, 1)] * STREAM, folds_between=True),
    "full reads": Drive([(4, 4)] * 15 + [(4, 3)], depth=ReadDepth.FULL),
    "shared key heads": Drive([(1, 1)] * STREAM, parts=4),
    "shared key heads, blocks": Drive([(4, 4)] * 15 + [(4, 3)], parts=8),
}
STORES = [
    *((DELTA, fmt) for fmt in (Format.BF16, Format.F32, Format.S32)),
    *((ADDITIVE, fmt) for fmt in (Format.BF16, Format.Q24, Format.Q16)),
]


@pytest.mark.parametrize(("at", "fmt"), STORES, ids=name_of)
@pytest.mark.parametrize("way", WAYS)
def test_a_checkpoint_is_a_function_of_the_tokens(
    at: LayerSpec, fmt: Format, way: str, hopper: torch.device
) -> None:
    assert sum(kept for _, kept in WAYS[way].blocks) == STREAM
    single = checkpoints(at, fmt, Drive([(1, 1)] * STREAM), hopper)
    assert same(checkpoints(at, fmt, WAYS[way], hopper), single)


@pytest.mark.parametrize(("at", "fmt"), STORES, ids=name_of)
def test_a_row_does_not_know_the_others(at: LayerSpec, fmt: Format, hopper: torch.device) -> None:
    blocks = WAYS["blocks of four"].blocks
    together = checkpoints(at, fmt, Drive(blocks), hopper)
    for row in range(len(STARTS)):
        alone = checkpoints(at, fmt, Drive(blocks, (row,)), hopper)
        assert same(alone, {name: x[row : row + 1] for name, x in together.items()})


def test_tokens_of_few_rows_and_of_many_leave_the_same_checkpoint(hopper: torch.device) -> None:
    from replayssm.ops.triton import additive_pass

    few = checkpoints(ADDITIVE, Format.Q24, Drive([(1, 1)] * STREAM), hopper)
    with patch.object(additive_pass, "FEW_ROWS", 0):
        many = checkpoints(ADDITIVE, Format.Q24, Drive([(1, 1)] * STREAM), hopper)
    assert same(few, many)


@pytest.mark.parametrize(("at", "fmt"), STORES, ids=name_of)
def test_entries_behind_a_boundary_do_not_reach_its_checkpoint(
    at: LayerSpec, fmt: Format, hopper: torch.device
) -> None:
    # eleven tokens from position 5 to the boundary, and one behind it
    blocks = [(4, 4)] * 3
    clean = checkpoints(at, fmt, Drive(blocks, (1,)), hopper)
    assert same(checkpoints(at, fmt, Drive(blocks, (1,), spoiled=True), hopper), clean)


@pytest.mark.parametrize("value_dim", [64, 128, 192, 320])
@pytest.mark.parametrize("value_heads", [2, 4, 8, 16])
def test_programs_that_share_a_key_head_take_all_of_its_tiles(
    value_dim: int, value_heads: int
) -> None:
    pytest.importorskip("triton")
    from replayssm.ops.triton.one_pass import programs_per_key_head

    at = LayerSpec(Write.DELTA, Decay.SCALAR, 2, value_heads, key_dim=128, value_dim=value_dim)
    for fmt in (Format.BF16, Format.F32, Format.S32):
        spec = StorageSpec(at, fmt, RING, torch.bfloat16)
        for rows in (1, 16, 32, 256, 4096):
            assert value_heads // 2 * value_dim // 64 % programs_per_key_head(spec, rows) == 0


def test_slots_that_are_not_aligned_are_refused() -> None:
    pytest.importorskip("triton")
    from replayssm.ops.triton.one_pass import check_strides

    store = allocate(StorageSpec(DELTA, Format.BF16, RING, torch.bfloat16), 2, torch.device("cpu"))
    check_strides(store)
    size = store.k[0].numel()
    k = torch.zeros(2 * size + 1, dtype=torch.bfloat16).as_strided(
        store.k.shape, (size + 1, *store.k.stride()[1:])
    )
    with pytest.raises(UnsupportedError, match=r"^k: the first slot"):
        check_strides(replace(store, k=k))


def test_a_step_that_is_refused_has_folded_nothing() -> None:
    pytest.importorskip("triton")
    from replayssm.ops.triton import host
    from replayssm.ops.triton.plan import device_plan

    cpu, zero, ran = torch.device("cpu"), np.zeros(1, np.int64), []
    store = allocate(StorageSpec(DELTA, Format.BF16, RING, torch.bfloat16), 1, cpu)
    block = make_block(DELTA, 1, 1, seed=0)
    plan = device_plan(BlockPlan(zero, zero, zero, zero, zero + 1), RING, [ReadDepth.FULL], 1, cpu)
    with (
        patch.object(host.one_pass, "folds", lambda *_: True),
        patch.object(host.one_pass, "fold_call", lambda *_: SimpleNamespace(run=ran.append)),
        patch.object(host, "choose_launch", side_effect=ContractError("table", "a folder", "")),
        pytest.raises(ContractError),
    ):
        # fp32 inputs: what is due is folded first, the block is read with a pull-back
        host.step_(store, plan, block, torch.empty_like(block.v))
    assert not ran


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
    for other in ({"key_dim": 64}, {"value_dim": 96}, {"value_heads": 6}, {"value_heads": 64},
                  {"decay": Decay.CHANNEL}, {"write": Write.ADDITIVE}):  # fmt: skip
        assert not serves(spec(**other))


def test_gates_of_16_bits_are_copied_two_at_a_time() -> None:
    pytest.importorskip("triton")
    from replayssm.ops.triton.additive_pass import can_copy_gates

    gates = torch.zeros(2, 1, 80)
    assert can_copy_gates(gates, 5)
    assert can_copy_gates(gates[:, :, 1:], 4)
    assert not can_copy_gates(gates[:, :, ::2], 4)
    assert can_copy_gates(gates.bfloat16(), 14)
    # an odd first head of a key head would be half a copy
    assert not can_copy_gates(gates.bfloat16(), 5)
    assert not can_copy_gates(gates.bfloat16()[:, :, 1:], 4)


def test_what_cannot_pull_back_beside_its_read_is_not_served() -> None:
    pytest.importorskip("triton")
    from replayssm.ops.triton import one_pass, pull_and_read

    def serves(fmt: str = "q24", ring: RingSpec = RING, **other: object) -> bool:
        at = {"write": Write.DELTA, "decay": Decay.SCALAR, "key_heads": 2, "value_heads": 8,
              "key_dim": 128, "value_dim": 128} | other  # fmt: skip
        spec = StorageSpec(LayerSpec(**at), Format(fmt), ring, torch.bfloat16)
        return pull_and_read.serves.__wrapped__(spec, torch.device("cuda"))

    with patch.object(one_pass, "is_hopper", return_value=True):
        assert serves()
        assert serves("q16", RingSpec(8, keep=3, max_block=5), value_heads=32)
        # a store is served by one of the two modules at most
        assert not any(serves(fmt) for fmt in ("f32", "s32", "bf16"))
        assert not serves(ring=RingSpec(17))
        assert not serves(ring=RingSpec(16, tiles=2))
        assert not serves(value_heads=2)
        assert not serves(value_heads=6)
        assert not serves(value_dim=192)
        assert not serves(write=Write.ADDITIVE)
        assert not serves(decay=Decay.CHANNEL)


def test_what_the_additive_kernels_cannot_fold_is_not_folded_there() -> None:
    pytest.importorskip("triton")
    from replayssm.ops.triton.additive_pass import serves

    def spec(ring: RingSpec = RING, fmt: str = "q24", **other: object) -> StorageSpec:
        at = {"write": Write.ADDITIVE, "decay": Decay.SCALAR, "key_heads": 2, "value_heads": 16,
              "key_dim": 128, "value_dim": 64} | other  # fmt: skip
        return StorageSpec(LayerSpec(**at), Format(fmt), ring, torch.bfloat16)

    assert all(serves(spec(fmt=fmt)) for fmt in ("bf16", "q24", "q16"))
    assert serves(spec(RingSpec(8, keep=3, max_block=5), value_heads=24))
    assert serves(spec(value_heads=14))
    for ring in (RingSpec(17), RingSpec(8, max_block=9), RingSpec(16, keep=1, max_block=9),
                 RingSpec(16, tiles=2)):  # fmt: skip
        assert not serves(spec(ring))
    assert not any(serves(spec(fmt=fmt)) for fmt in ("f32", "s32"))
    for other in ({"key_dim": 64}, {"value_dim": 128}, {"value_heads": 6}, {"write": Write.DELTA},
                  {"decay": Decay.CHANNEL}):  # fmt: skip
        assert not serves(spec(**other))
