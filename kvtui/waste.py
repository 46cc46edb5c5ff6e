"""How much of the memory in use is of use, and how much would be if it were reserved in one piece for each request."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from engine.request import RequestStatus

if TYPE_CHECKING:
    from engine.trace.state import PoolState


class Waste(NamedTuple):
    """How well memory is used at one moment.

    Attributes:
        held_tokens: S, the tokens whose keys and values lie in blocks in use, each block counted once.
        used_blocks: Blocks in use.
        utilisation: S / (used_blocks x block_size).
        waste: 1 - utilisation: slots of partly filled blocks (internal fragmentation).
        reserved_waste: 1 - sum S_i / sum S_i^max over the requests that hold blocks: what would lie idle if each had
            reserved contiguous memory for the most it can come to, S_i^max = min(prompt + max_tokens, max_model_len).
            This is the kind measured for earlier systems in Kwon et al., SOSP 2023 (section 3.1), and a mild form of
            it: those often reserved max_model_len.
        bytes: S x kv_bytes_per_token, where that is 2 x layers x kv_heads x head_dim x bytes of one element (and of a
            quantised cache 2 x layers x kv_heads x bytes of a scale).
    """

    held_tokens: int
    used_blocks: int
    utilisation: float
    waste: float
    reserved_waste: float
    bytes: int


def waste_of(state: PoolState) -> Waste:
    """Measure the memory of a state; zeros where nothing is in use. The pool's size plays no part in the time."""
    header = state.header
    used = int(state.used)
    held = state.held_slots
    tokens = longest = 0
    for request in state.requests.values():
        if request.table and not RequestStatus(request.status).is_finished:
            tokens += request.num_held(header.block_size)
            longest += max(
                request.num_computed, min(request.num_prompt_tokens + request.max_tokens, header.max_model_len)
            )
    utilisation = held / (used * header.block_size) if used else 0.0
    return Waste(
        held_tokens=held,
        used_blocks=used,
        utilisation=utilisation,
        waste=1 - utilisation if used else 0.0,
        reserved_waste=1 - tokens / longest if longest else 0.0,
        bytes=held * header.model.kv_bytes_per_token,
    )
