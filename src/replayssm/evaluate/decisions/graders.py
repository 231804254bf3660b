"""Rule-based graders of replies: what a reply to a ticket must and must not do.

A grader looks at one reply and says whether it passes, or None where its rule does not apply. The
precision decision counts the replies that the baseline got right and a variant did not. Four rules
come with the package; others are added by name with :func:`register`, or by a package that declares
an entry point in the group ``replayssm.graders``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points

from replayssm.errors import ContractError

GROUP = "replayssm.graders"
LONGEST_RUN = 32
ACTIONS = (
    "cancel",
    "charge",
    "close the ticket",
    "credit",
    "delete",
    "escalate",
    "refund",
    "replace",
    "reset your",
    "send you",
    "ship",
    "upgrade",
)
_QUESTION = re.compile(r"([A-Za-z][A-Za-z ]*(?:=|: | is ))$")
_WORD = re.compile(r"\s*(\S+)")


@dataclass(frozen=True, slots=True)
class Ticket:
    """One reply with what it answers.

    Attributes:
        prompt: The ticket, history included, ending in what the reply continues.
        reply: The reply of the variant that is graded.
        reference: The baseline's reply to the same ticket.
    """

    prompt: str
    reply: str
    reference: str


Grader = Callable[[Ticket], bool | None]


def facts(ticket: Ticket) -> bool | None:
    """The value that a ticket asks for is one that the ticket states.

    Applies to tickets that end in an open statement (``ab=``, ``the key is``) which they complete
    somewhere before.
    """
    question = _QUESTION.search(ticket.prompt)
    if question is None:
        return None
    before = ticket.prompt[: question.start()]
    stated = set(re.findall(re.escape(question.group(1)) + r"(\w+)", before))
    return any(ticket.reply.startswith(value) for value in stated) if stated else None


def actions(ticket: Ticket) -> bool | None:
    """A reply promises no action that its ticket does not speak of."""
    prompt, reply = ticket.prompt.lower(), ticket.reply.lower()
    return not any(word in reply and word not in prompt for word in ACTIONS)


def form(ticket: Ticket) -> bool | None:
    """A reply is text: not empty, decodable, and no character repeated without end."""
    if not ticket.reply or "\N{REPLACEMENT CHARACTER}" in ticket.reply or "\0" in ticket.reply:
        return False
    return re.search(rf"(.)\1{{{LONGEST_RUN}}}", ticket.reply, re.DOTALL) is None


def consistency(ticket: Ticket) -> bool | None:
    """A reply opens with the same word as the baseline's reply to the same ticket."""
    mine, theirs = (_WORD.match(text) for text in (ticket.reply, ticket.reference))
    if theirs is None:
        return None
    return mine is not None and mine.group(1) == theirs.group(1)


_KNOWN: dict[str, Grader] = {
    "facts": facts,
    "actions": actions,
    "format": form,
    "consistency": consistency,
}


def register(name: str, grader: Grader) -> None:
    """Add a grader under a name of its own.

    Raises:
        ContractError: The name is taken.
    """
    if name in _KNOWN:
        raise ContractError("name", "a name that no grader has", name)
    _KNOWN[name] = grader


def find(names: tuple[str, ...]) -> dict[str, Grader]:
    """Return graders by name, those of installed packages included.

    Raises:
        ContractError: There is no grader of that name.
    """
    others = {entry.name: entry for entry in entry_points(group=GROUP)}
    found: dict[str, Grader] = {}
    for name in names:
        if name in _KNOWN:
            found[name] = _KNOWN[name]
        elif name in others:
            found[name] = others[name].load()
        else:
            known = ", ".join(sorted({*_KNOWN, *others}))
            raise ContractError("decisions.precision.graders", f"names out of {known}", name)
    return found
