"""An endless stream of sessions, made from those of the built-in workloads: what a dashboard opens with.

Who comes, with what and in which order is drawn with a seed. When they come depends on the answers as well: so many
sessions are open at once and no more, so that the stream suits a slow machine and a fast one.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvtui.workloads.catalog import load_workload
from kvtui.workloads.workload import Message, Session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TITLE = "Chats, questions about documents and several endings, on and on"

CYCLE = 24
"""Callers after which the tide begins again."""
RUSH = 10
"""The last so many of a cycle come at once, each with another document: more than fits."""
MOST_AT_ONCE = 14
_MEAN_GAP_S = 0.6
_LONGEST_GAP_S = 2.0
_CHATS_FIRST = 3
"""Short prompts: text is seen at once, also where a document takes seconds."""
_PAUSE_S = 0.4
"""Between an answer and the next turn; the few that are open at ebb are not to pause all at once for long."""
_DOCUMENT_LASTS = 12
"""Callers that ask about one document before there is another."""
_SHARE_OF_DOCUMENT = 5
"""A document takes at most one part in so many of the pool."""


@dataclass(frozen=True, slots=True)
class Room:
    """What the engine has room for, so that no session is refused.

    Attributes:
        pool_tokens: Tokens that the whole pool holds.
        max_model_len: Longest request, prompt and output.
        forks: Whether several outputs of one prompt can be asked for.
        count: Tokens of a text.
    """

    pool_tokens: int
    max_model_len: int
    forks: bool
    count: Callable[[str], int]


@dataclass(frozen=True, slots=True)
class Caller:
    """A session of the stream.

    Attributes:
        session: Its `at` says nothing.
        gap: Seconds that it comes after the one before, at least.
        at_once: Sessions that may be open then, itself among them.
    """

    session: Session
    gap: float
    at_once: int


def callers(seed: int, room: Room) -> Iterator[Caller]:
    """Callers without end; equal seeds in equal rooms give equal ones."""
    chats, endings = load_workload("chat").sessions, load_workload("fork").sessions
    questions = load_workload("rag").sessions
    editions = _editions(questions[0].messages[0].content, room)
    laps: Counter[str] = Counter()
    number = 0
    while True:
        source = random.Random(f"stream {seed} {number}")
        place = number % CYCLE
        rush = place >= CYCLE - RUSH
        kind = source.random()
        if rush:
            edition = editions[place % len(editions)]
            session = _asked_about(source.choice(questions), edition, source.randint(60, 120))
        elif kind < 0.5 or number < _CHATS_FIRST:
            session = _shorter(source.choice(chats), source, (24, 110))
        elif kind < 0.85 or not room.forks:
            edition = editions[number // _DOCUMENT_LASTS % len(editions)]
            session = _asked_about(source.choice(questions), edition, source.randint(20, 70))
        else:
            session = _shorter(source.choice(endings), source, (30, 90))
        session = _within(session, room)
        laps[session.name] += 1
        lap = laps[session.name]
        yield Caller(
            replace(
                session,
                name=session.name if lap == 1 else f"{session.name}/{lap}",
                params=replace(session.params, seed=source.getrandbits(31)),
            ),
            gap=0.0 if rush else min(_LONGEST_GAP_S, source.expovariate(1 / _MEAN_GAP_S)),
            at_once=MOST_AT_ONCE if rush else round(5 + 2 * math.sin(2 * math.pi * place / (CYCLE - RUSH))),
        )
        number += 1


def _editions(document: str, room: Room) -> list[str]:
    """The document once for each of its paragraphs, beginning with that one and going on for as long as there is room.

    What to do with it and its title come first in all of them.
    """
    most = min(room.pool_tokens // _SHARE_OF_DOCUMENT, room.max_model_len // 2)
    task, title, *paragraphs = document.split("\n\n")
    sizes = [room.count(paragraph) for paragraph in paragraphs]
    editions = []
    for first in range(len(paragraphs)):
        left, kept = most, [task, title]
        for place in (*range(first, len(paragraphs)), *range(first)):
            left -= sizes[place]
            if left < 0:
                break
            kept.append(paragraphs[place])
        editions.append("\n\n".join(kept))
    return editions


def _asked_about(question: Session, document: str, max_tokens: int) -> Session:
    return replace(
        question,
        messages=(Message("system", document), *question.messages[1:]),
        params=replace(question.params, max_tokens=max_tokens),
    )


def _shorter(session: Session, source: random.Random, lengths: tuple[int, int]) -> Session:
    """A session with some of its turns, soon after each other, and answers of another length."""
    turns = source.randint(0, len(session.follow_ups))
    return replace(
        session,
        follow_ups=session.follow_ups[:turns],
        pause=_PAUSE_S,
        params=replace(session.params, max_tokens=source.randint(*lengths)),
    )


def _within(session: Session, room: Room) -> Session:
    """A session that takes at most half of the pool, with fewer turns, then fewer choices, then shorter answers."""
    most = min(room.pool_tokens // 2, room.max_model_len)

    def size(of: Session) -> int:
        said = [message.content for message in of.messages] + list(of.follow_ups)
        return room.count("\n\n".join(said)) + of.num_requests * of.params.n * of.params.max_tokens

    while session.follow_ups and size(session) > most:
        session = replace(session, follow_ups=session.follow_ups[:-1])
    while session.params.n > 1 and size(session) > most:
        session = replace(session, params=replace(session.params, n=session.params.n - 1))
    spare = session.params.max_tokens + most - size(session)
    if spare < session.params.max_tokens:
        session = replace(session, params=replace(session.params, max_tokens=max(1, spare)))
    return session
