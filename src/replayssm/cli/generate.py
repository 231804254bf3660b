"""``replayssm generate``: prompt in, text out, on either path."""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from replayssm.cli.output import (
    JSON_OPTION,
    MODEL_HELP,
    print_json,
    quiet_transformers,
    use_threads,
)
from replayssm.errors import ContractError
from replayssm.types import Format, ReadDepth

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from replayssm.evaluate.subject import Subject
    from replayssm.integrations.transformers import Enabled

NGRAM_DRAFTS = 8


class Path(StrEnum):
    """Which path carries the state."""

    STANDARD = "standard"
    REPLAY = "replay"


class Drafts(StrEnum):
    """What proposes tokens for the model to verify."""

    NGRAM = "ngram"
    MODEL = "model"


def generate(
    prompt: Annotated[str, typer.Argument(help="Prompt; - reads it from stdin.")],
    model: Annotated[str, typer.Option(help=MODEL_HELP)] = "gdn-tiny",
    path: Annotated[Path, typer.Option(help="How the state is carried.")] = Path.REPLAY,
    state: Annotated[
        Format | None,
        typer.Option(help="State format.", show_default="s32 for replay, f32 for standard"),
    ] = None,
    read: Annotated[ReadDepth, typer.Option(help="Planes that a step reads.")] = ReadDepth.FULL,
    window: Annotated[int, typer.Option(min=1, help="Tokens between two folds.")] = 16,
    draft: Annotated[
        Drafts | None,
        typer.Option(
            help="Speculate: repeat what followed the same words before, or ask draft-tiny.",
            show_default="no drafts",
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampling.")] = 0,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads.", show_default="all cores")
    ] = None,
    as_json: Annotated[bool, JSON_OPTION] = False,
) -> None:
    """Generate text from a prompt, with the state on the standard or the replay path."""
    use_threads(threads)
    quiet_transformers()
    import torch

    from replayssm.evaluate.subject import load
    from replayssm.integrations.transformers import enable

    text = sys.stdin.read() if prompt == "-" else prompt
    subject = load(model)
    tokens = subject.encode(text.encode())
    if not tokens:
        raise ContractError("PROMPT", "at least one token", "none")
    if draft is not None and path is Path.STANDARD:
        raise ContractError("--draft", "--path replay; the standard path has no rollback", path)
    ids = torch.tensor([tokens], device=subject.model.device)
    torch.manual_seed(seed)
    start = time.perf_counter()
    with (
        _drafting(draft, subject) as drafting,
        enable(subject.model, path=path.value, state=state, read=read, window=window) as handle,
    ):
        new = _continue(subject, ids, max_new_tokens, temperature, drafting)
        used = {**_settings(handle), "draft": draft}
    took = time.perf_counter() - start
    written = subject.decode(new)
    if as_json:
        about = {"model": subject.name, "prompt": text, "text": written, "new_tokens": len(new)}
        print_json({**about, "seconds": round(took, 3), **used})
        return
    sys.stdout.write(text + written + "\n")


def _settings(handle: Enabled) -> dict[str, object]:
    return {
        "path": handle.path,
        "state": handle.state.value,
        "read": handle.read.value,
        "window": handle.window,
        "impl": handle.impl.value,
    }


@contextmanager
def _drafting(draft: Drafts | None, subject: Subject) -> Iterator[dict[str, object]]:
    """Yield what ``generate`` of transformers takes for a way to draft."""
    from replayssm.integrations.transformers import enable
    from replayssm.models import tiny

    if draft is not Drafts.MODEL:
        yield {} if draft is None else {"prompt_lookup_num_tokens": NGRAM_DRAFTS}
        return
    if subject.name not in tiny.NAMES:
        expected = f"a bundled model, whose tokens draft-tiny knows ({', '.join(tiny.NAMES)})"
        raise ContractError("--draft model", expected, subject.name)
    assistant = tiny.load("draft-tiny", device=subject.model.device)
    with enable(assistant):
        yield {"assistant_model": assistant}


def _continue(
    subject: Subject,
    ids: Tensor,
    max_new_tokens: int,
    temperature: float,
    drafting: dict[str, object],
) -> list[int]:
    sampling: dict[str, object] = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0}
    model: Any = subject.model
    out = model.generate(ids, max_new_tokens=max_new_tokens, **sampling, **drafting)
    new: list[int] = out[0, ids.shape[1] :].tolist()
    return new
