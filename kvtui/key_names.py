"""What keys are called: by Textual, and on the keyboard."""

from __future__ import annotations

_SIGNS = {
    "full_stop": ".",
    "comma": ",",
    "right_square_bracket": "]",
    "left_square_bracket": "[",
    "slash": "/",
    "question_mark": "?",
    "plus": "+",
    "minus": "-",
    "equals_sign": "=",
}
_KEYS = {sign: key for key, sign in _SIGNS.items()} | {" ": "space"}


def shown_keys(keys: str) -> str:
    """The keys of a binding as they are printed on them."""
    return " or ".join(_SIGNS.get(key, key) for key in keys.split(","))


def key_of(sign: str) -> str:
    """The name of a key that may be written as the sign on it."""
    return _KEYS.get(sign, sign)
