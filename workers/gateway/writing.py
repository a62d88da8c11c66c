"""One choice of an answer in the making: tokens of a generation to text, up to a stop string or the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

from answers import Delta, Token, Written
from choosing import Scored
from generation import Generation
from knot.tokenizer import Tokenizer
from text import TextStream

T = TypeVar("T")


class Echo:
    """A prompt that its answer begins with: its text and ids, which the generation `scored_by` scores.

    A first id that the tokenizer put there and the text does not have is left out.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: str | Sequence[int],
        ids: Sequence[int],
        scored_by: Generation | None,
    ) -> None:
        self._tokenizer = tokenizer
        self._ids = ids
        self._scored_by = scored_by
        self._skipped = int(isinstance(prompt, str) and bool(ids) and ids[0] == _put_first(tokenizer))
        self.text = prompt if isinstance(prompt, str) else tokenizer.decode(ids)

    @property
    def scored(self) -> bool:
        """Whether its ids are scored, which they are once the prompt has been read."""
        return self._scored_by is not None

    def delta(self) -> Delta:
        """The text, and its tokens if they are scored."""
        if self._scored_by is None:
            return Delta(self.text)
        scored: list[Scored | None] = [None, *self._scored_by.scored]
        return Delta(self.text, self._tokens(scored))

    def _tokens(self, scored: Sequence[Scored | None]) -> list[Token]:
        decoder = self._tokenizer.stream()
        found: list[Token] = []
        at = 0
        try:
            for number, token in enumerate(self._ids):
                if number >= self._skipped:
                    found.append(Token(token, at, scored[number]))
                    at += len(decoder.push(token))
        finally:
            decoder.finish()
        return found


def _put_first(tokenizer: Tokenizer) -> int | None:
    return tokenizer.info.bos_id if tokenizer.info.add_bos else None


class Writing:
    """A choice being written. Iterate `deltas` once; `written` is complete when they end."""

    def __init__(
        self,
        generation: Generation,
        tokenizer: Tokenizer,
        *,
        most: int,
        stops: Sequence[str],
        ends: Sequence[int],
        echo: Echo | None = None,
    ) -> None:
        self.generation = generation
        self.written = Written()
        self._tokenizer = tokenizer
        self._most = most
        self._stops = stops
        self._ends = ends
        self._echo = echo

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Pieces of text as they become certain, none of them empty. Raises `Refusal`."""
        try:
            async with aclosing(self._pieces()) as pieces:
                async for delta in pieces:
                    if delta.text or delta.tokens:
                        self.written.text += delta.text
                        self.written.tokens += delta.tokens
                        yield delta
        finally:
            self.generation.leave()  # which may not have been needed

    async def _pieces(self) -> AsyncGenerator[Delta, None]:
        echo = self._echo
        if echo is not None and not echo.scored:
            yield echo.delta()
            echo = None
        # To score a prompt is to read it, which ends with a token whether one is wanted or not.
        most = self._most or int(echo is not None)
        if not most:
            return
        async with aclosing(self.generation.tokens(most)) as tokens:
            if echo is None:
                async with aclosing(self._made(tokens)) as made:
                    async for delta in made:
                        yield delta
                return
            first = await anext(tokens)
            yield echo.delta()
            if self._most:
                async with aclosing(self._made(_with_first(first, tokens))) as made:
                    async for delta in made:
                        yield delta

    async def _made(self, tokens: AsyncGenerator[Scored, None]) -> AsyncGenerator[Delta, None]:
        written = self.written
        offset = len(self._echo.text) if self._echo else 0
        decoder = self._tokenizer.stream()
        text = TextStream(decoder, self._stops)
        scored: list[Scored] = []
        given = 0
        finished = False

        def delta(piece: str) -> Delta:
            nonlocal given
            new = range(given, text.settled)
            given = text.settled
            return Delta(piece, [Token(scored[n].id, offset + text.starts[n], scored[n]) for n in new])

        try:
            async for one in tokens:
                written.ids.append(one.id)
                if one.id in self._ends:
                    written.finish = "stop"
                    break
                scored.append(one)
                yield delta(text.push(one.id))
                if text.stopped:
                    break
            finished = True
            yield delta(text.finish())
            if text.stopped:
                written.finish = "stop"
            if written.finish == "stop":
                self.generation.stop()
        finally:
            if not finished:
                decoder.finish()  # frees the stream's place in the engine


async def _with_first(first: Scored, tokens: AsyncGenerator[Scored, None]) -> AsyncGenerator[Scored, None]:
    yield first
    async for one in tokens:
        yield one


async def merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """What several streams give, each with its stream's number, as it comes.

    Each goes on only when what it gave was taken. When one fails, so does the whole; all are closed then.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for found in only:
                yield 0, found
        return
    given: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue()
    room = asyncio.Semaphore(1)

    async def follow(number: int, stream: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(stream):
                async for found in stream:
                    await room.acquire()
                    given.put_nowait((number, found))
        except Exception as error:
            given.put_nowait(error)
        else:
            given.put_nowait(None)

    tasks = [asyncio.ensure_future(follow(number, stream)) for number, stream in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            found = await given.get()
            if isinstance(found, Exception):
                raise found
            if found is None:
                left -= 1
            else:
                yield found
                room.release()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for stream in streams:
            await stream.aclose()  # one whose task never began
