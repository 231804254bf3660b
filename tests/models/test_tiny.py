"""The bundled tiny models: windowed attention against a dense reference, loading, recall."""

from __future__ import annotations

import pytest

from replayssm.errors import ContractError
from replayssm.evaluate.probes import make_probes
from replayssm.models import tiny

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


def dense_reference(q, k, v, window, scale):
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    rows = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
    columns = torch.arange(k.shape[2])[None]
    seen = (columns <= rows) & (columns > rows - window)
    scores = (q @ k.transpose(-1, -2)) * scale
    return scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v


@pytest.mark.parametrize(
    ("steps", "positions"), [(1, 1), (1, 50), (5, 5), (7, 40), (8, 9), (9, 9), (30, 30), (30, 45)]
)
def test_window_attention_equals_dense(steps: int, positions: int) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 4, steps, 6, dtype=torch.float64)
    k = torch.randn(2, 2, positions, 6, dtype=torch.float64)
    v = torch.randn(2, 2, positions, 5, dtype=torch.float64)
    got = tiny.window_attention(q, k, v, window=8, scale=0.4)
    want = dense_reference(q, k, v, 8, 0.4)
    # The softmax is fp32 by design.
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_text_round_trip() -> None:
    assert tiny.decode(tiny.encode("naïve = 1\n")) == "naïve = 1\n"


def test_unknown_name_is_refused() -> None:
    with pytest.raises(ContractError, match=r"^name: expected one of"):
        tiny.weights_path("huge")


def test_heldout_text_is_python() -> None:
    text = tiny.heldout_text()
    assert 200_000 < len(text) < 400_000
    assert text.count(b"\ndef ") > 100


@pytest.fixture(scope="module", params=tiny.NAMES)
def model(request):
    return tiny.load(request.param)


# The new name of the argument is not known to older releases that are tested too.
@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
@torch.no_grad()
def test_cache_and_padding_do_not_change_logits(model) -> None:
    from transformers import DynamicCache

    text = tiny.heldout_text()[1000:1180]
    ids = torch.tensor([list(text)])
    positions = torch.arange(ids.shape[1])[None]
    full = model(input_ids=ids, use_cache=False).logits
    cache = DynamicCache(config=model.config)
    parts = []
    for begin, end in ((0, 100), (100, 177), (177, 178), (178, 179), (179, 180)):
        part = model(
            input_ids=ids[:, begin:end],
            position_ids=positions[:, begin:end],
            past_key_values=cache,
            use_cache=True,
        )
        parts.append(part.logits)
    torch.testing.assert_close(torch.cat(parts, 1), full, rtol=1e-3, atol=2e-3)

    padded = torch.cat((torch.zeros(1, 13, dtype=torch.long), ids), 1)
    mask = torch.cat((torch.zeros(1, 13, dtype=torch.long), torch.ones_like(ids)), 1)
    left = model(input_ids=padded, attention_mask=mask, use_cache=False).logits[:, 13:]
    torch.testing.assert_close(left, full, rtol=1e-3, atol=2e-3)


@torch.no_grad()
def test_model_recalls_beyond_its_window(model) -> None:
    probes = make_probes("key_value", 448, 4, filler=tiny.heldout_text(), seed=11)
    ids = torch.tensor([list(p.prompt + p.answer) for p in probes])
    size = len(probes[0].answer)
    best = model(input_ids=ids, use_cache=False).logits[:, -size - 1 : -1].argmax(-1)
    assert int((best == ids[:, -size:]).all(1).sum()) >= 3
