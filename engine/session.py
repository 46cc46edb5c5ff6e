"""What the engine keeps for a live request besides the request itself: its text, and who is told of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from engine.output_text import OutputText
from engine.request import FinishReason, RequestOutput

if TYPE_CHECKING:
    from engine.request import Request
    from engine.runner import TextCodec

logger = logging.getLogger("engine")

OutputCallback = Callable[[RequestOutput], None]


class Session:
    """A request and its output on the way to the caller.

    Attributes:
        request: The request.
        pieces: Text of its prompt's tokens, for the trace; None where nobody asked for it.
    """

    __slots__ = ("_new_text", "_new_tokens", "_on_output", "_text", "pieces", "request")

    def __init__(self, request: Request, pieces: list[str] | None, on_output: OutputCallback | None) -> None:
        self.request = request
        self.pieces = pieces
        self._on_output = on_output
        self._text: OutputText | None = None
        self._new_text = ""
        self._new_tokens: list[int] = []

    def choice(self, request: Request) -> Session:
        """The session of another choice that was asked for with this one."""
        return Session(request, None, self._on_output)

    @property
    def has_news(self) -> bool:
        """Whether tokens came that the caller has not been told of."""
        return bool(self._new_tokens)

    def push(self, token_id: int, ends: FinishReason | None, codec: TextCodec) -> tuple[str, FinishReason | None]:
        """Take in a new token.

        Args:
            token_id: The token.
            ends: Why the output ends with it, as far as that shows without its text.
            codec: Makes text of it. Whatever it raises goes through.

        Returns:
            The text that it completed, and why the output ends with it: a stop string is the better reason.
        """
        self._new_tokens.append(token_id)
        text = self._text
        if text is None:
            stream = codec.stream(self.request.prompt_token_ids)
            text = self._text = OutputText(stream, self.request.params.stop)
        piece = ""
        if ends is not FinishReason.STOP:
            # A token that ends the output is not part of its text.
            piece, shown = text.push(token_id)
            self._new_text += shown
        if ends is not None and not text.stopped:
            rest, shown = text.finish()
            piece += rest
            self._new_text += shown
        return piece, FinishReason.STOP if text.stopped else ends

    def flush(self) -> None:
        """Add what was held back to the text, unless a stop string ended it."""
        if self._text is None or self._text.stopped:
            return
        try:
            self._new_text += self._text.finish()[1]
        except Exception:
            logger.exception("the last text of request %d could not be decoded", self.request.request_id)

    def take_output(self) -> RequestOutput:
        """What came since the last call."""
        request = self.request
        output = RequestOutput(
            request_id=request.request_id - request.index,
            text=self._new_text,
            token_ids=tuple(self._new_tokens),
            finish_reason=request.finish_reason,
            error=request.error,
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=len(request.output_token_ids),
            num_cached_tokens=request.num_cached_tokens,
            index=request.index,
            outgrew_pool=request.outgrew_pool,
        )
        self._new_text = ""
        self._new_tokens = []
        return output

    def deliver(self, output: RequestOutput) -> None:
        """Call the caller back. A callback that raises is not called again and harms nobody else."""
        if self._on_output is None:
            return
        try:
            self._on_output(output)
        except Exception:
            logger.exception("on_output of request %d failed and is not called again", output.request_id)
            self._on_output = None
