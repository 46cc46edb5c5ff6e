"""Text comes out in whole characters and complete, whatever the tokens are."""

from __future__ import annotations

import random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from engine.model.tokenizer import MAX_TEXT, TokenizerCodec
from engine.request import RequestError

TEXTS = [
    "plain words",
    "naïve café, 中文字 и кириллица",
    "family 👩‍👩‍👧‍👦 and flags 🇸🇪🇸🇪",
    "tabs\tand\nlines\r\n and  spaces   ",
    "\x1b[31mred\x1b[0m [bold]markup[/bold]",
    "a\ufffdb",
    "",
]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, so that every character beyond ASCII comes in parts; <s> in front, <e> at the end."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("<e>", special=True)])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="<e>")


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """As Llama 2's: words begin with ▁, unknown characters fall back to byte tokens, the first space is dropped."""
    pieces = ["<unk>", "<s>", "<e>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "▁hello", "▁world", "he", "l", "o"]
    pieces += [c for c in "helowrd" if c not in pieces]
    backend = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("<e>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


@pytest.fixture(scope="module")
def codec() -> TokenizerCodec:
    return TokenizerCodec(byte_tokenizer())


def streamed(codec: TokenizerCodec, token_ids: list[int], prompt: list[int] | None = None) -> list[str]:
    stream = codec.stream(prompt or [])
    return [*(stream.push(token_id) for token_id in token_ids), stream.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_streamed_text_is_the_text_in_whole_characters(codec: TokenizerCodec, text: str) -> None:
    ids = codec.encode(text)[1:]
    assert len(ids) == len(text.encode())
    parts = streamed(codec, ids)
    assert "".join(parts) == text
    if "\ufffd" not in text:
        assert all("\ufffd" not in part for part in parts)


def test_half_a_character_at_the_end_is_flushed_as_a_replacement(codec: TokenizerCodec) -> None:
    ids = codec.encode("ab中")[1:]
    assert streamed(codec, ids[:-1]) == ["a", "b", "", "", "\ufffd"]
    assert streamed(codec, ids) == ["a", "b", "", "", "中", ""]


def test_flush_comes_once_and_the_stream_goes_on(codec: TokenizerCodec) -> None:
    stream = codec.stream([])
    first, second, third = codec.encode("中")[1:]
    assert stream.push(first) == ""
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""
    assert stream.push(codec.encode("x")[1]) == "x"
    assert [stream.push(t) for t in (first, second, third)] == ["", "", "中"]


def test_endless_halves_of_characters_are_let_out_and_cost_no_growing_work(codec: TokenizerCodec) -> None:
    half = codec.encode("中")[1]
    stream = codec.stream([])
    parts = [stream.push(half) for _ in range(1000)]
    assert max(len(part) for part in parts) <= 40
    assert len("".join(parts)) + len(stream.flush()) == 1000
    assert stream.push(codec.encode("y")[1]) == "y"


def test_any_tokens_give_what_the_tokenizer_decodes(codec: TokenizerCodec) -> None:
    rng = random.Random(4)
    characters = [codec.encode(c)[1:] for c in "aé中🙂 z"]
    for _ in range(200):
        ids = [t for _ in range(12) for t in rng.choice(characters)]
        assert "".join(streamed(codec, ids)) == bytes_of(codec, ids).decode()
        assert "".join(codec.pieces(ids)) == bytes_of(codec, ids).decode()


def bytes_of(codec: TokenizerCodec, ids: list[int]) -> bytes:
    of = {codec.encode(chr(i))[1]: i for i in range(128)}
    for c in "é中🙂":
        of |= dict(zip(codec.encode(c)[1:], c.encode(), strict=True))
    return bytes(of[i] for i in ids)


def test_special_tokens_are_named_in_pieces_and_absent_from_output(codec: TokenizerCodec) -> None:
    ids = [*codec.encode("a b"), *codec.encode("<e>")[1:]]
    assert codec.pieces(ids) == ["<s>", "a", " ", "b", "<e>"]
    assert "".join(streamed(codec, ids)) == "a b"


def test_there_is_a_piece_for_every_token_also_of_broken_text(codec: TokenizerCodec) -> None:
    half = codec.encode("中")[1]
    for ids in ([], [half], [half] * 50, [half, codec.encode("a")[1], half]):
        pieces = codec.pieces(ids)
        assert len(pieces) == len(ids)
        assert "".join(pieces).replace("a", "") == "\ufffd" * ids.count(half)


def test_an_output_begins_with_the_space_that_parts_it_from_the_prompt() -> None:
    codec = TokenizerCodec(sentencepiece_tokenizer())
    hello, world = (codec._backend.token_to_id(p) for p in ("▁hello", "▁world"))
    assert streamed(codec, [world, hello], [hello]) == [" world", " hello", ""]
    assert streamed(codec, [world, hello]) == ["world", " hello", ""]


def test_byte_fallback_tokens_become_characters() -> None:
    codec = TokenizerCodec(sentencepiece_tokenizer())
    ids = [codec._backend.token_to_id(f"<0x{b:02X}>") for b in "é".encode()]
    hello = codec._backend.token_to_id("▁hello")
    assert streamed(codec, [hello, *ids, hello], [hello]) == [" hello", "", "é", " hello", ""]


def test_a_prompt_that_ends_in_half_a_character_does_not_leak_into_the_output(codec: TokenizerCodec) -> None:
    first, second, third = codec.encode("中")[1:]
    parts = streamed(codec, [second, third, *codec.encode("ok")[1:]], [first])
    assert "".join(parts).endswith("ok")
    assert "中" not in "".join(parts)


def test_lone_surrogates_become_replacements_and_pairs_become_characters(codec: TokenizerCodec) -> None:
    ids = codec.encode("a\ud800b \ud83d\ude42")
    assert "".join(streamed(codec, ids)) == "a\ufffdb 🙂"


def test_a_text_beyond_all_bounds_is_refused_before_it_is_looked_at(codec: TokenizerCodec) -> None:
    with pytest.raises(RequestError, match="4,000,001 characters is too long"):
        codec.encode("x" * (MAX_TEXT + 1))


def test_limits_stored_with_a_tokenizer_do_not_cut_prompts() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=64)
    assert len(TokenizerCodec(tokenizer).encode("0123456789")) == 11


CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]


def test_a_conversation_goes_through_the_models_template() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "<s>{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    codec = TokenizerCodec(tokenizer)
    assert "".join(codec.pieces(codec.encode_chat(CHAT))) == "<s>[system]be brief[user]hi[assistant]"


def test_a_model_without_a_template_gets_plain_paragraphs(codec: TokenizerCodec) -> None:
    assert "".join(codec.pieces(codec.encode_chat(CHAT))) == "<s>system: be brief\nuser: hi\nassistant:"


def test_messages_that_are_none_are_refused_by_place(codec: TokenizerCodec) -> None:
    with pytest.raises(RequestError, match="at least one"):
        codec.encode_chat([])
    with pytest.raises(RequestError, match="message 1 lacks a role or a content"):
        codec.encode_chat([CHAT[0], {"role": "user"}])
    with pytest.raises(RequestError, match="message 0"):
        codec.encode_chat([{"role": "user", "content": None}])  # type: ignore[dict-item]


def test_a_template_that_refuses_says_so_in_one_line() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must\n alternate') }}"
    with pytest.raises(RequestError, match="chat template refuses the messages: roles must alternate"):
        TokenizerCodec(tokenizer).encode_chat(CHAT)
