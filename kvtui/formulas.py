"""Every quantity that the panels show, as a formula with the live numbers put in.

S_i are the tokens of request i whose keys and values lie in the cache, B the slots of a block, and the sums go over the
requests that hold blocks. Sources: the size of a KV cache and its fragmentation, Kwon et al., SOSP 2023, sections 3 and
6; batches that requests join and leave at every step, Yu et al., OSDI 2022.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from engine.request import RequestStatus
from engine.sizes import in_bytes

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from engine.trace.events import Header
    from engine.trace.state import PoolState
    from kvtui.history import History
    from kvtui.waste import Waste

_MOST_TERMS = 3
"""Terms of a sum that are written out."""


class Formula(NamedTuple):
    """A quantity.

    Attributes:
        name: What it is.
        symbols: How it is worked out.
        numbers: The same with numbers; empty where there is nothing to work out yet.
        value: What comes out.
        note: What the letters mean, or how the numbers were got.
    """

    name: str
    symbols: str
    numbers: str
    value: str
    note: str

    def in_ascii(self) -> Formula:
        """The same for a terminal that knows no more."""
        return Formula(*(_ascii(text) for text in self))


_ASCII = {
    "⌈": "ceil(",
    "⌉": ")",
    "Σ": "sum ",
    "·": "*",
    "−": "-",
    "…": "...",
    "≤": "at most",
    "×": "x",
    "₁": "1",
    "₀": "0",
}


def _ascii(text: str) -> str:
    for char, plain in _ASCII.items():
        text = text.replace(char, plain)
    return text


def formulas_of(state: PoolState, history: History, waste: Waste) -> list[Formula]:
    """All of them for one moment; time proportional to the live requests and to what the history remembers."""
    header = state.header
    holders = [r for r in state.requests.values() if r.table and not RequestStatus(r.status).is_finished]
    lengths = [r.num_held(header.block_size) for r in holders]
    return [
        _cache_bytes(header, lengths),
        _block_bytes(header, waste),
        _blocks(header, lengths, waste),
        _utilisation(header, waste),
        _fragmentation(waste),
        _average_batch(history),
        _throughput(history),
        _speed_up(history),
        _hit_rate(state),
    ]


def _shape(header: Header) -> tuple[str, float]:
    """The numbers of layers, heads and head size, and the bytes of one element; a scale stored beside it counts in."""
    model = header.model
    elements = 2 * model.num_layers * model.num_kv_heads * model.head_dim
    shape = f"2·{model.num_layers}·{model.num_kv_heads}·{model.head_dim}"
    return shape, model.kv_bytes_per_token / elements if elements else 0.0


def _cache_bytes(header: Header, lengths: list[int]) -> Formula:
    shape, per_element = _shape(header)
    total = sum(lengths)
    numbers = f"{shape}·{total / len(lengths):,.4g}·{len(lengths):,}·{per_element:.4g} B" if lengths else ""
    return Formula(
        "KV cache",
        "2·L·H_kv·d·S·b·P",
        numbers,
        in_bytes(total * header.model.kv_bytes_per_token),
        "keys and values, L layers, H_kv heads of d, S tokens on average in b requests, P bytes each; nothing shared",
    )


def _block_bytes(header: Header, waste: Waste) -> Formula:
    shape, per_element = _shape(header)
    size = header.block_size * header.model.kv_bytes_per_token
    return Formula(
        "pool in use",
        "N·2·L·H_kv·d·B·P",
        f"{waste.used_blocks:,}·{shape}·{header.block_size}·{per_element:.4g} B",
        in_bytes(waste.used_blocks * size),
        f"N blocks in use of {header.num_blocks:,}, each of B = {header.block_size} slots and {in_bytes(size)}",
    )


def _blocks(header: Header, lengths: list[int], waste: Waste) -> Formula:
    size = header.block_size
    places = [-(-length // size) for length in lengths]
    terms = [f"⌈{length:,}/{size}⌉" for length in lengths[:_MOST_TERMS]]
    if len(lengths) > _MOST_TERMS:
        terms.append("…")
    total = sum(places)
    shared = total - waste.used_blocks
    note = f"places in block tables; {waste.used_blocks:,} blocks are in use"
    if shared > 0:
        note += f": {shared:,} fewer, since blocks are shared"
    elif shared < 0:
        note += f": {-shared:,} more, taken for tokens to come"
    return Formula("blocks", "Σ⌈S_i/B⌉", " + ".join(terms), f"{total:,}", note)


def _utilisation(header: Header, waste: Waste) -> Formula:
    return Formula(
        "utilisation",
        "used/allocated",
        f"{waste.held_tokens:,}/({waste.used_blocks:,}·{header.block_size})" if waste.used_blocks else "",
        f"{waste.utilisation:.1%}",
        "slots that hold a token, each block once, of the slots of the blocks in use; the rest is waste",
    )


def _fragmentation(waste: Waste) -> Formula:
    most = waste.reserved_slots
    return Formula(
        "fragmentation",
        "1 − used/ΣS_i^max",
        f"1 − {waste.held_tokens:,}/{most:,}" if most else "",
        f"{waste.reserved_waste:.1%}" if most else "0%",
        "empty, or copies of what is stored once here, had each reserved S_i^max = min(prompt + max_tokens, "
        "max_model_len) for itself",
    )


def _average_batch(history: History) -> Formula:
    batches = history.recent()["batch"]
    batches = batches[batches > 0]
    total, steps = int(batches.sum()), len(batches)
    return Formula(
        "average batch",
        "Σ|batch_t|/T",
        f"{total:,}/{steps:,}" if steps else "",
        f"{total / steps:.2f} requests" if steps else "0",
        f"over the last T = {steps:,} steps with a batch",
    )


def _throughput(history: History) -> Formula:
    tokens, seconds = _produced(history)
    return Formula(
        "throughput",
        "tokens/time",
        f"{tokens:,}/{seconds:.3f} s" if seconds > 0 else "",
        f"{tokens / seconds:,.1f} tokens/s" if seconds > 0 else "0",
        "new tokens of the same steps, from the start of the first to the end of the last",
    )


def _produced(history: History) -> tuple[int, float]:
    """Tokens of the last steps, and the seconds that these took."""
    rows = history.recent()
    if not len(rows):
        return 0, 0.0
    return int(rows["generated"].sum()), float(rows["start_ns"][-1] + _took(rows)[-1] - rows["start_ns"][0]) / 1e9


def _took(rows: npt.NDArray[np.void]) -> npt.NDArray[np.int64]:
    """How long each step took."""
    took: npt.NDArray[np.int64] = rows["schedule_ns"] + rows["execute_ns"] + rows["sample_ns"] + rows["update_ns"]
    return took


def _speed_up(history: History) -> Formula:
    """Against the same engine with one request at a time, which makes one token in each step of t₁ seconds.

    t₁ is measured where a request happened to decode alone. Else a step of the same engine that decoded for several
    takes no less than one for a single request, so that the shortest bounds t₁, and the speed-up, from above.
    """
    tokens, seconds = _produced(history)
    name, symbols = "speed-up", "t₁·tokens/time"
    rows = history.remembered()
    decodes = rows[(rows["decode_tokens"] > 0) & (rows["prefill_tokens"] == 0) & (rows["recompute_tokens"] == 0)]
    alone = _took(decodes[decodes["batch"] == 1])
    if seconds <= 0 or not len(decodes):
        return Formula(name, symbols, "", "unknown", "over one request at a time: no step has only decoded yet")
    if len(alone):
        t_1 = float(alone.mean()) / 1e9
        bound = ""
        note = f"t₁: mean of the {len(alone):,} steps remembered in which one request decoded alone"
    else:
        t_1 = float(_took(decodes).min()) / 1e9
        bound = "≤ "
        note = "no request decoded alone, so t₁ is at most the shortest step that decoded for several"
    return Formula(
        name,
        symbols,
        f"{t_1:.4f} s·{tokens:,}/{seconds:.3f} s",
        f"{bound}{t_1 * tokens / seconds:.2f}×",
        f"over one request at a time, a token a step; {note}",
    )


def _hit_rate(state: PoolState) -> Formula:
    hits, asked = state.counters.prefix_hit_tokens, state.counters.prefix_queried_tokens
    return Formula(
        "prefix hits",
        "found/asked for",
        f"{hits:,}/{asked:,} tokens" if asked > 0 else "",
        f"{hits / asked:.1%}" if asked > 0 else "none asked for",
        "prompt tokens of all admissions since the start, and how many of them the cache had",
    )
