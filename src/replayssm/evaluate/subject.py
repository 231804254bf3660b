"""The model under evaluation, its tokenizer and its held-out text."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from replayssm.errors import ContractError, UnsupportedError
from replayssm.models import tiny

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from transformers import PreTrainedModel

    from replayssm.types import LayerSpec

DEFAULT_MODEL = "gdn-tiny"
SMALL = 100_000_000


@dataclass(frozen=True, slots=True)
class Subject:
    """What is evaluated.

    Attributes:
        name: Bundled name, hub id, or the last part of a local path.
        model: The model, in evaluation mode.
        encode: Bytes to token ids.
        text: Held-out text.
        decode: Token ids to text.
    """

    name: str
    model: PreTrainedModel = field(repr=False)
    encode: Callable[[bytes], list[int]]
    decode: Callable[[list[int]], str]
    text: bytes = field(repr=False)

    @property
    def parameters(self) -> int:
        """Parameters of the model."""
        return sum(p.numel() for p in self.model.parameters())

    @property
    def is_small(self) -> bool:
        """Whether the interpreter's own time dominates its decode steps."""
        return self.parameters < SMALL


@dataclass(frozen=True, slots=True)
class Texts:
    """Held-out sequences.

    Attributes:
        ids: ``[rows, tokens]`` int64.
        sizes: ``[rows, tokens]`` bytes that each token stands for.
    """

    ids: NDArray[np.int64]
    sizes: NDArray[np.float64]


def check_exists(model: str) -> None:
    """Refuse what is clearly a local path and is not there, before any hub is asked.

    Raises:
        ContractError: ``model`` is such a path.
    """
    is_path = model.startswith((".", "/", "~")) or model.count("/") > 1
    if is_path and not Path(model).is_dir():
        raise ContractError("--model", "a folder that exists", Path(model).name)


def public_name(model: str) -> str:
    """Return a model's name without any local folder."""
    return Path(model).name if Path(model).exists() else model


def load(model: str) -> Subject:
    """Load a bundled model by name, or any transformers model by path or hub id.

    Raises:
        UnsupportedError: The bundled weights are not installed.
        ContractError: Nothing can be loaded under that name.
    """
    if model in tiny.NAMES:
        try:
            return from_bytes_model(model, tiny.load(model))
        except FileNotFoundError as error:
            raise UnsupportedError(
                f"{model}: its weights are not part of this installation; name another with --model"
            ) from error
    check_exists(model)
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    try:
        config = AutoConfig.from_pretrained(model)
        # a copy of a bundled model names the window its attention was trained with
        width = getattr(config, "replayssm_window", None)
        attention = None if width is None else tiny.register_window_attention(width)
        loaded = AutoModelForCausalLM.from_pretrained(
            model, dtype="auto", attn_implementation=attention
        ).eval()
        if loaded.config.get_text_config().vocab_size == 256:
            return from_bytes_model(public_name(model), loaded)
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise ContractError(
            "--model", "a bundled name, path or hub id", f"{model}: {first}"
        ) from error

    def encode(data: bytes) -> list[int]:
        text = data.decode("utf-8", errors="replace")
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids))

    return Subject(public_name(model), loaded, encode, decode, tiny.heldout_text())


def from_bytes_model(name: str, model: PreTrainedModel) -> Subject:
    """Wrap a byte-level model (vocabulary 256, token id = byte)."""
    return Subject(name, model, list, tiny.decode, tiny.heldout_text())


def held_out(subject: Subject, rows: int, tokens: int, seed: int) -> Texts:
    """Cut ``rows`` disjoint pieces of ``tokens`` tokens out of the held-out text.

    Raises:
        ContractError: The text holds fewer pieces.
    """
    ids = np.array(subject.encode(subject.text), np.int64)
    pieces = len(ids) // tokens
    if pieces < rows:
        raise ContractError("text_rows", f"at most {pieces} of {tokens} tokens", rows)
    picks = np.random.default_rng([seed, tokens]).permutation(pieces)[:rows]
    chosen = np.stack([ids[pick * tokens : (pick + 1) * tokens] for pick in picks])
    if subject.encode is list:
        return Texts(chosen, np.ones(chosen.shape))
    # the average of a piece: single tokens of a tokenizer need not decode by themselves
    sizes = [len(subject.decode(row.tolist()).encode()) / tokens for row in chosen]
    return Texts(chosen, np.repeat(np.array(sizes)[:, None], tokens, axis=1))


def one_geometry(specs: tuple[LayerSpec, ...]) -> LayerSpec:
    """Return the geometry that most layers share."""
    if not specs:
        raise UnsupportedError("the model has no recurrent layer of a supported kind")
    return max(set(specs), key=specs.count)
