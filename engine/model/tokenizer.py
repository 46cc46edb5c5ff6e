"""Text to tokens and back, over a model's own fast tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenizers.decoders import DecodeStream

from engine.request import RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenizers import Tokenizer

MAX_TEXT = 4_000_000
"""Longest text that is tokenized, in characters: some seconds of work, and far over any model's positions."""

_MAX_PENDING = 16
"""Tokens held back for the rest of a character. A character has at most four bytes, so more is not text."""

_REPLACEMENT = "\ufffd"


class TokenizerCodec:
    """`engine.runner.TextCodec` over a transformers tokenizer.

    Args:
        tokenizer: A `PreTrainedTokenizerFast`.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend: Tokenizer = tokenizer.backend_tokenizer
        # Otherwise a length limit or padding stored in the tokenizer's file would cut prompts or add to them.
        self._backend.no_truncation()
        self._backend.no_padding()

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, with the special tokens that the model wants in front.

        A special token written out in the text is that token, as in transformers. A lone surrogate, which is no
        character, becomes U+FFFD.

        Raises:
            RequestError: The text is too long to be looked at.
        """
        ids: list[int] = self._backend.encode(_checked(text)).ids
        return ids

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Tokens of a conversation in the model's chat template, up to where it answers.

        A model without a template gets `role: content` paragraphs.

        Raises:
            RequestError: There are no messages, one lacks its role or content, or the template refuses them.
        """
        if not messages:
            raise RequestError("a conversation without messages is not possible: send at least one")
        for i, message in enumerate(messages):
            if not (isinstance(message.get("role"), str) and isinstance(message.get("content"), str)):
                raise RequestError(f"message {i} lacks a role or a content (both are text)")
        if not self._tokenizer.chat_template:
            lines = [f"{message['role']}: {message['content']}\n" for message in messages]
            return self.encode("".join(lines) + "assistant:")
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # the template is the model's own code: it may raise anything
            reason = " ".join(str(error).split())
            raise RequestError(f"the model's chat template refuses the messages: {reason}") from error
        # The template writes the special tokens itself.
        ids: list[int] = self._backend.encode(_checked(text), add_special_tokens=False).ids
        return ids

    def stream(self, prompt_token_ids: Sequence[int]) -> TokenStream:
        """A stream for the output that follows a prompt."""
        return TokenStream(self._backend, prompt_token_ids)

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each token, special tokens by name; joined they give the whole text.

        A character of several tokens stands at its last one.
        """
        stream = TokenStream(self._backend, skip_special_tokens=False)
        pieces = [stream.push(token_id) for token_id in token_ids]
        if pieces:
            pieces[-1] += stream.flush()
        return pieces


class TokenStream:
    """`engine.runner.TextStream`: whole characters as their tokens come.

    Args:
        backend: The tokenizer.
        context: Tokens that come before; they decide whether the output begins with a space.
        skip_special_tokens: Leave them out instead of writing their names.
    """

    __slots__ = ("_backend", "_pending", "_recent", "_skip", "_stream")

    def __init__(self, backend: Tokenizer, context: Sequence[int] = (), *, skip_special_tokens: bool = True) -> None:
        self._backend = backend
        self._skip = skip_special_tokens
        self._recent: list[int] = []
        self._pending: list[int] = []
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._restart(list(context[-4:]))

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while it ends in half a character."""
        self._pending.append(token_id)
        try:
            text = self._stream.step(self._backend, token_id)
        except Exception:  # bytes that are no text can break the decoder's bookkeeping; the text so far is known here
            return self.flush()
        if text is None:
            # Nothing to show: a special token, or half a character.
            if len(self._pending) > _MAX_PENDING:
                return self.flush()
            return ""
        self._recent = self._pending[-4:]
        self._pending = []
        return text

    def flush(self) -> str:
        """What is still held back, with U+FFFD for bytes that never became a character."""
        pending, self._pending = self._pending, []
        if not pending:
            return ""
        before = self._decode(self._recent)
        both = self._decode(self._recent + pending)
        text = both[len(before) :] if both.startswith(before) else self._decode(pending)
        self._restart(pending[-4:])
        return text

    def _restart(self, context: list[int]) -> None:
        self._recent = context
        self._stream = DecodeStream(skip_special_tokens=self._skip)
        for token_id in context:
            try:
                self._stream.step(self._backend, token_id)
            except Exception:
                self._recent, self._stream = [], DecodeStream(skip_special_tokens=self._skip)
                return
        if self._decode(context).endswith(_REPLACEMENT):
            # Half a character of the context would come out with the first token.
            self._recent, self._stream = [], DecodeStream(skip_special_tokens=self._skip)

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._backend.decode(token_ids, skip_special_tokens=self._skip)
        return text


def _checked(text: str) -> str:
    if len(text) > MAX_TEXT:
        raise RequestError(f"a text of {len(text):,} characters is too long: the most is {MAX_TEXT:,}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
