"""One sequence on an enabled model, for a speculative loop of our own.

:class:`Decoder` appends tokens and takes the newest back: what a draft model needs.
:class:`Verifier` runs a block of drafts, chain or tree, in one forward and commits one path of it
afterwards. ``replayssm.engine.speculative`` has drafters, acceptance rules and the loop.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from replayssm.errors import ContractError, UnsupportedError
from replayssm.integrations import hooks
from replayssm.integrations.bind import bind
from replayssm.models.tiny import attention_window
from replayssm.ring import RingSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from replayssm.integrations.transformers import Enabled

MAX_NODES = 64
"""Most drafts of one block, as in ``replayssm.engine.speculative``."""


class Decoder:
    """One sequence on an enabled model, in a cache of its own.

    Args:
        handle: The enabled model, on the replay path.
        keep: Most of the newest tokens that :meth:`rollback` takes back.
        max_block: Most tokens that :meth:`step` runs as one block; longer ones are prefills.

    Raises:
        ContractError: The model is enabled on the standard path.
    """

    def __init__(self, handle: Enabled, *, keep: int = 0, max_block: int = 1) -> None:
        from transformers import DynamicCache

        if handle.path == "standard":
            raise ContractError("handle", "a model on the replay path", handle.path)
        model: Any = handle.model
        self._model = model
        self._config = model.config.get_text_config()
        self._cache: Any = DynamicCache(config=self._config)
        # attention that forgets keeps what a rollback lays open again
        self._cache.activate_past_recording()
        self._binding = bind(handle, self._cache, 0)
        block = max(max_block, keep + 1) if keep else max_block
        self._binding.ring = RingSpec(handle.window, keep=keep, max_block=block)
        self._parameters = set(inspect.signature(model.forward).parameters)
        self._argument = hooks.cache_argument(model)

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return self._binding.position

    def step(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Append tokens, a prompt or its continuation; return ``[vocab]`` logits after the last."""
        if not len(tokens):
            raise ContractError("tokens", "at least one", "none")
        depths = np.arange(len(tokens))
        last: NDArray[np.float32] = self._forward(tokens, depths, None, keep_logits=1)[-1]
        # lets attention that records its past drop what is too old
        self._cache.crop(0)
        return last

    def rollback(self, count: int) -> None:
        """Take the newest ``count`` tokens back, at most ``keep``.

        Raises:
            ContractError: That many were not kept; nothing was changed.
        """
        self._cache.crop(-count)

    @torch.no_grad()
    def _forward(
        self,
        tokens: Sequence[int],
        depths: NDArray[np.int64],
        mask: Tensor | None,
        *,
        keep_logits: int,
    ) -> NDArray[np.float32]:
        device = self._model.get_input_embeddings().weight.device
        offered = {
            "position_ids": torch.as_tensor(depths + self.length, device=device)[None],
            "attention_mask": mask,
            "logits_to_keep": keep_logits,
            "use_cache": True,
        }
        arguments = {name: value for name, value in offered.items() if name in self._parameters}
        ids = torch.as_tensor(np.asarray(tokens, np.int64), device=device)[None]
        out = self._model(ids, **{self._argument: self._cache}, **arguments)
        logits: NDArray[np.float32] = out.logits[0].float().cpu().numpy()
        return logits


class Verifier(Decoder):
    """One sequence whose next tokens are proposed and verified a block at a time.

    A round is :meth:`verify`, then :meth:`commit`. Between the two nothing else may run.

    Args:
        handle: The enabled model, on the replay path.
        max_nodes: Most drafts of one block, up to 64.
        keep: As for :class:`Decoder`; commits need none.

    Raises:
        ContractError: An argument is out of range, or the model is on the standard path.
    """

    def __init__(self, handle: Enabled, *, max_nodes: int = MAX_NODES, keep: int = 0) -> None:
        if not 1 <= max_nodes <= MAX_NODES:
            raise ContractError("max_nodes", f"1 to {MAX_NODES}", max_nodes)
        super().__init__(handle, keep=keep, max_block=max_nodes + 1)
        self._max_nodes = max_nodes

    def prefill(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Append a prompt; return ``[vocab]`` logits after its last token."""
        return self.step(tokens)

    def verify(
        self, tokens: Sequence[int], parents: Sequence[int] | None = None
    ) -> NDArray[np.float32]:
        """Run a block ``[pending, *drafts]`` in one forward; nothing is committed.

        Args:
            tokens: N + 1 token ids.
            parents: ``[N + 1]`` the token of the block that each one continues, -1 for the
                committed sequence; None for a chain.

        Returns:
            ``[N + 1, vocab]`` logits; row i says what follows token i.

        Raises:
            ContractError: Too many tokens, or a parent that does not come before its child.
            UnsupportedError: A tree where the attention takes chains only.
        """
        if not 1 <= len(tokens) <= self._max_nodes + 1:
            raise ContractError("tokens", f"1 to {self._max_nodes + 1} tokens", len(tokens))
        if not self.length:
            raise ContractError("verify", "a sequence that has begun", "none", "prefill() first")
        depths, mask = np.arange(len(tokens)), None
        if parents is not None:
            parents = [int(parent) for parent in parents]
            self._check_tree()
            is_ancestor = ancestors(parents, len(tokens))
            depths = is_ancestor.sum(1) - 1
            mask = self._tree_mask(is_ancestor, depths)
        self._binding.hold(len(tokens), parents)
        return self._forward(tokens, depths, mask, keep_logits=0)

    def commit(self, path: Sequence[int]) -> None:
        """Keep the tokens of one path of the verified block, and drop the others everywhere.

        Args:
            path: Tokens of the block from the pending one (0) downwards; empty drops all of them.

        Raises:
            ContractError: No block was verified, or the path does not go down its tree.
        """
        self._binding.commit([int(token) for token in path])

    def _check_tree(self) -> None:
        if any(getattr(layer, "is_sliding", False) for layer in self._cache.layers):
            raise UnsupportedError("trees over sliding-window attention layers; verify chains")

    def _tree_mask(self, is_ancestor: NDArray[np.bool_], depths: NDArray[np.int64]) -> Tensor:
        """Return ``[1, 1, T, N]``: every token sees the committed past and its ancestors."""
        past = self.length
        implementation = self._config._attn_implementation
        seen = np.concatenate([np.ones((len(depths), past), bool), is_ancestor], axis=1)
        window = attention_window(implementation)
        if window is not None:
            distance = past + depths[:, None] - np.concatenate([np.arange(past), past + depths])
            seen &= distance < window
        weight = self._model.get_input_embeddings().weight
        mask = torch.as_tensor(seen, device=weight.device)[None, None]
        if implementation != "eager":
            return mask
        floor = torch.finfo(weight.dtype).min
        return torch.zeros_like(mask, dtype=weight.dtype).masked_fill(~mask, floor)


def ancestors(parents: Sequence[int], tokens: int) -> NDArray[np.bool_]:
    """Return ``[T, T]``: whether token j is token i or an ancestor of it.

    Raises:
        ContractError: There is another number of parents, or one does not come before its child.
    """
    if len(parents) != tokens or any(not -1 <= p < t for t, p in enumerate(parents)):
        raise ContractError("parents", f"{tokens} integers, -1 <= parents[t] < t", list(parents))
    table = np.eye(tokens, dtype=np.bool_)
    for token, parent in enumerate(parents):
        if parent >= 0:
            table[token] |= table[parent]
    return table
