"""The bodies of the OpenAI API that are understood here, checked, and what is answered.

Fields that would change the answer and are not supported are refused by name; unknown ones are ignored. Beyond the
API, `top_k`, `min_p`, `ignore_eos`, `stop_token_ids` and `cache_salt` are understood, under vLLM's names.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec

from engine.request import FinishReason, RequestError, RequestOutput, SamplingParams
from engine.serving.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
MAX_NAME_LENGTH = 64

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "echo": (None, False),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "suffix": (None, ""),
    "logit_bias": (None, {}),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "tools": (None, []),
    "functions": (None, []),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "audio": (None,),
}
"""Unsupported fields, and the values of them that ask for nothing."""

_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class StreamOptions(msgspec.Struct):
    """What a stream brings besides the text."""

    include_usage: bool | None = None


class GenerationBody(msgspec.Struct, kw_only=True):
    """What both kinds of request may say; null counts as left out."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[_TokenId] | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def name(self) -> str:
        """The caller's own name for the request: `metadata.name`, or else `user`."""
        return ((self.metadata or {}).get("name") or self.user or "")[:MAX_NAME_LENGTH]

    def params(self, default_max_tokens: int) -> SamplingParams:
        """How to sample.

        Raises:
            ApiError: a value is not possible; names the field.
        """
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if len(stop) > MAX_STOP_STRINGS or any(len(s) > MAX_STOP_LENGTH for s in stop):
            raise ApiError(
                f"stop: at most {MAX_STOP_STRINGS} strings of {MAX_STOP_LENGTH} characters are possible", param="stop"
            )
        # The API says 1 where a temperature is left out.
        given = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p}
        fields: dict[str, Any] = {"temperature": 1.0} | {k: v for k, v in given.items() if v is not None}
        if fields.get("top_k", 0) < 0:
            fields["top_k"] = 0  # -1 means "all" elsewhere
        try:
            return SamplingParams(
                max_tokens=default_max_tokens if self.max_tokens is None else self.max_tokens,
                seed=self.seed,
                stop=stop,
                stop_token_ids=tuple(self.stop_token_ids or ()),
                ignore_eos=bool(self.ignore_eos),
                cache_salt=self.cache_salt,
                n=1 if self.n is None else self.n,
                **fields,
            )
        except RequestError as error:
            named = next((f for f in ("max_tokens", "n ", *given) if str(error).startswith(f)), "stop")
            raise ApiError(str(error), param=named.strip()) from error


class CompletionBody(GenerationBody, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[str | int | list[int]]

    def single_prompt(self, vocab_size: int) -> str | list[int]:
        """The prompt: text, or token ids that the model has.

        Raises:
            ApiError: there are several, or a token id is out of range.
        """
        prompt = self.prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            if len(prompt) != 1:
                raise ApiError("prompt: one prompt a request is possible; send several requests", param="prompt")
            return CompletionBody(prompt=prompt[0]).single_prompt(vocab_size)  # type: ignore[arg-type]
        if isinstance(prompt, str):
            return prompt
        token_ids: list[int] = []
        for token_id in prompt:
            if not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
                raise ApiError(f"prompt: {token_id!r} is not a token id, 0 to {vocab_size - 1}"[:200], param="prompt")
            token_ids.append(token_id)
        return token_ids


class ContentPart(msgspec.Struct):
    """A part of a message's content."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct):
    """A message of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None

    def plain(self, place: int) -> dict[str, str]:
        """As the chat template takes it.

        Raises:
            ApiError: an unknown role, or a content that is not text.
        """
        role = "system" if self.role == "developer" else self.role
        if role not in ("system", "user", "assistant"):
            raise ApiError(
                f"messages[{place}].role: {self.role[:40]!r} is not one of system, user and assistant", param="messages"
            )
        if isinstance(self.content, list):
            for part in self.content:
                if part.type != "text" or part.text is None:
                    raise ApiError(
                        f"messages[{place}].content: a part of type {part.type[:40]!r} is not possible; text is",
                        param="messages",
                    )
            return {"role": role, "content": "".join(part.text or "" for part in self.content)}
        return {"role": role, "content": self.content or ""}


class ChatBody(GenerationBody, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.max_completion_tokens is not None:
            self.max_tokens = self.max_completion_tokens

    def conversation(self) -> list[dict[str, str]]:
        """The messages, as the chat template takes them.

        Raises:
            ApiError: there are none, or one is not possible.
        """
        if not self.messages:
            raise ApiError("messages: is empty; send at least one message", param="messages")
        return [message.plain(place) for place, message in enumerate(self.messages)]


Body = TypeVar("Body", bound=GenerationBody)


def decode_body(raw: bytes, kind: type[Body]) -> Body:
    """The body of a request, checked.

    Raises:
        ApiError: it is not JSON, a field is wrong or missing, or asks for what is not supported; names the field.
    """
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ApiError(f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ApiError("the body is not a JSON object")
    for name, neutral in _NEUTRAL.items():
        if name in value and value[name] not in neutral:
            wish = "only 1 is" if name == "best_of" else "leave it out"
            raise ApiError(f"{name}: not supported here; {wish}", param=name, code="unsupported_parameter")
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        what, _, path = str(error).partition(" - at ")
        place = path.strip("`").removeprefix("$.")
        missing = re.search(r"required field `(\w+)`", what)
        param = place or (missing[1] if missing else None)
        message = f"{place}: {what}" if place else what
        raise ApiError(message, param=param, code="missing_required_parameter" if missing else None) from error


def usage(choices: Sequence[RequestOutput]) -> dict[str, Any]:
    """Token counts of all choices' last outputs; the prompt, which they share, counts once."""
    first = choices[0]
    generated = sum(output.num_output_tokens for output in choices)
    return {
        "prompt_tokens": first.num_prompt_tokens,
        "completion_tokens": generated,
        "total_tokens": first.num_prompt_tokens + generated,
        "prompt_tokens_details": {"cached_tokens": first.num_cached_tokens},
    }


def finish_word(reason: FinishReason | None) -> str | None:
    """`stop` or `length` as the API has them; `abort` where someone else ended the request."""
    return None if reason is None else str(reason)


class AnswerForm:
    """How the answers to one request are written, whole and in chunks."""

    def __init__(self, answer_id: str, model: str, created: int, *, chat: bool) -> None:
        self._chat = chat
        self._frame = {"id": answer_id, "created": created, "model": model}

    def whole(self, answers: Sequence[tuple[str, RequestOutput]]) -> dict[str, Any]:
        """The answer in one piece: the text and the last output of each choice."""
        choices: list[dict[str, Any]] = []
        for text, last in answers:
            reason = finish_word(last.finish_reason)
            choice: dict[str, Any] = {"index": last.index, "finish_reason": reason, "logprobs": None}
            if self._chat:
                choice["message"] = {"role": "assistant", "content": text, "refusal": None}
            else:
                choice["text"] = text
            choices.append(choice)
        kind = "chat.completion" if self._chat else "text_completion"
        return self._frame | {"object": kind, "choices": choices, "usage": usage([last for _, last in answers])}

    def opening(self, index: int = 0) -> dict[str, Any] | None:
        """The first chunk of a choice in a conversation, which names the role."""
        return self._chunk({"role": "assistant", "content": ""}, None, index) if self._chat else None

    def chunk(self, text: str, reason: FinishReason | None, index: int = 0) -> dict[str, Any]:
        """A chunk with new text of a choice, its last one with the reason."""
        return self._chunk({"content": text} if text else {}, finish_word(reason), index, text)

    def closing_usage(self, last: Sequence[RequestOutput]) -> dict[str, Any]:
        """The chunk after the last that carries the usage and no choice."""
        return self._frame | {"object": self._chunk_object, "choices": [], "usage": usage(last)}

    @property
    def _chunk_object(self) -> str:
        return "chat.completion.chunk" if self._chat else "text_completion"

    def _chunk(self, delta: dict[str, str], reason: str | None, index: int, text: str = "") -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "finish_reason": reason, "logprobs": None}
        choice |= {"delta": delta} if self._chat else {"text": text}
        return self._frame | {"object": self._chunk_object, "choices": [choice]}
