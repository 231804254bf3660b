"""Trees of candidates: shared prefixes merged, nodes in depth-first order.

The most promising child comes first, so the path most often accepted is a prefix of the block and
every subtree is one run of nodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from replayssm.engine.speculative.draft import MAX_NODES, Draft

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from replayssm.engine.speculative.follow import DraftModel


def depth_first(tokens: Sequence[int], parents: Sequence[int]) -> Draft:
    """Return the tree with its nodes in depth-first order, siblings in the order given.

    Args:
        tokens: N tokens.
        parents: N parents, each before its children; -1 continues the pending token.
    """
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    new = {-1: -1}
    stack = children.get(-1, [])[::-1]
    order: list[int] = []
    while stack:
        node = stack.pop()
        new[node] = len(order)
        order.append(node)
        stack.extend(reversed(children.get(node, [])))
    return Draft(
        np.array([tokens[node] for node in order], np.int64),
        np.array([new[parents[node]] for node in order], np.int64),
    )


def merge_paths(paths: Iterable[Sequence[int]], limit: int) -> Draft:
    """Return the tree of several continuations; earlier paths win where nodes run out.

    Args:
        paths: Continuations of the pending token, most promising first.
        limit: Most nodes; never more than 64.
    """
    limit = min(limit, MAX_NODES)
    known: dict[tuple[int, int], int] = {}
    for path in paths:
        node = -1
        for token in path:
            key = (node, int(token))
            if key not in known:
                if len(known) >= limit:
                    break
                known[key] = len(known)
            node = known[key]
    return depth_first([token for _, token in known], [parent for parent, _ in known])


def expand_top_k(
    model: DraftModel, logits: NDArray[np.floating[Any]], width: int, forwards: int, limit: int
) -> Draft:
    """Return the most probable nodes of a tree grown where a draft model is most confident.

    ``forwards`` times, the most probable node not yet forwarded is forwarded and its ``width`` best
    tokens become candidates. Then the ``limit`` candidates of highest joint probability are kept: a
    parent is at least as probable as its child, so what is kept is a tree.

    Mutates the draft model on the way and takes every token back.

    Args:
        model: Stands after the pending token.
        logits: ``[vocab]`` that it gave there.
        width: Children per forwarded node.
        forwards: Most nodes forwarded; 0 proposes only siblings.
        limit: Most nodes; never more than 64.
    """
    limit = min(limit, MAX_NODES)
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    paths: list[tuple[int, ...]] = []
    waiting: set[int] = set()

    def add_children(parent: int, row: NDArray[np.floating[Any]]) -> None:
        base, path = (scores[parent], paths[parent]) if parent >= 0 else (0.0, ())
        for token, score in _top_k(row, width):
            waiting.add(len(tokens))
            tokens.append(token)
            parents.append(parent)
            scores.append(base + score)
            paths.append((*path, token))

    add_children(-1, logits)
    state: tuple[int, ...] = ()
    for _ in range(min(forwards, limit - 1)):
        if not waiting:
            break
        best = max(waiting, key=lambda node: (scores[node], -node))
        waiting.remove(best)
        row = model.move(state, paths[best])
        state = paths[best]
        add_children(best, row)
    model.take_back(len(state))

    ranked = sorted(range(len(tokens)), key=lambda node: (-scores[node], node))[:limit]
    new = {-1: -1} | {node: i for i, node in enumerate(ranked)}
    return depth_first([tokens[n] for n in ranked], [new[parents[n]] for n in ranked])


def _top_k(row: NDArray[np.floating[Any]], width: int) -> list[tuple[int, float]]:
    """Return the ``width`` best tokens with their log-probabilities, best first."""
    wide = np.asarray(row, np.float64)
    # a stable sort gives ties to the lowest token id, as the argmax does
    best = np.argsort(-wide, kind="stable")[:width]
    top = wide[best[0]]
    log_total = float(np.log(np.exp(wide - top).sum()))
    return [
        (int(token), float(wide[token] - top) - log_total)
        for token in best
        if np.isfinite(wide[token])
    ]
