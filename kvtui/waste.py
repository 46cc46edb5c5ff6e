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
        reserved_slots: Sum of S_i^max over the requests that hold blocks: what they would take if each had reserved
            contiguous memory for the most it can come to, S_i^max = min(prompt + max_tokens, max_model_len).
        reserved_waste: 1 - S / reserved_slots: how much of that would hold nothing, or one more copy of a token that
            is counted in S already, since what is reserved in one piece cannot be shared. Where nothing is shared,
            S = sum S_i, and it is what Kwon et al., SOSP 2023 (section 3.1) measured for earlier systems, in a mild
            form: those often reserved max_model_len.
        bytes: S x kv_bytes_per_token, where that is 2 x layers x kv_heads x head_dim x bytes of one element (and of a
            quantised cache 2 x layers x kv_heads x bytes of a scale).
    """

    held_tokens: int
    used_blocks: int
    utilisation: float
    waste: float
    reserved_slots: int
    reserved_waste: float
    bytes: int


def waste_of(state: PoolState) -> Waste:
    """Measure the memory of a state; zeros where nothing is in use. The pool's size plays no part in the time."""
    header = state.header
    used = int(state.used)
    held = state.held_slots
    longest = 0
    for request in state.requests.values():
        if request.table and not RequestStatus(request.status).is_finished:
            longest += max(
                request.num_computed, min(request.num_prompt_tokens + request.max_tokens, header.max_model_len)
            )
    utilisation = held / (used * header.block_size) if used else 0.0
    return Waste(
        held_tokens=held,
        used_blocks=used,
        utilisation=utilisation,
        waste=1 - utilisation if used else 0.0,
        reserved_slots=longest,
        reserved_waste=max(0.0, 1 - held / longest) if longest else 0.0,
        bytes=held * header.model.kv_bytes_per_token,
    )
