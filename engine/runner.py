"""What the engine's loop asks of a model: one forward over a packed batch, and text for tokens.

`engine.model.runner.ModelRunner` is the real one; `engine.simulated` has one without a model. Neither the loop nor
the scheduler knows which it drives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.core.scheduler_output import BlockCopy, SchedulerOutput
    from engine.trace.events import ModelInfo


class Runner(Protocol):
    """Computes one iteration."""

    @property
    def model_info(self) -> ModelInfo:
        """Shapes and names, for the trace's header and the formulas."""
        ...

    @property
    def max_model_len(self) -> int:
        """Longest sequence that the model's positions allow, in tokens."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens with which the model itself ends an output."""
        ...

    def execute(self, output: SchedulerOutput) -> list[int | None]:
        """Run the batch; the sampled token of each scheduled request, in the batch's order, and then of each fork.

        None stands where a request's known tokens are not all computed by this step (a prefill chunk in the middle).
        Sets `last_execute_ns` and `last_sample_ns`.

        Raises:
            RunnerError: names the requests that cannot go on; the others are unharmed.
        """
        ...

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Move contents of blocks, in the order given; called before the step's `execute`, where there are any.

        What it raises ends the engine: the cache would not hold what the block tables say.
        """
        ...

    def preemption_costs(self) -> tuple[float, float]:
        """What the two ways of preemption cost: ns to copy one block to the CPU pool or back; ns to compute one token.

        Asked once, before the first step, and only where there is a CPU pool.
        """
        ...

    @property
    def last_execute_ns(self) -> int:
        """Duration of the last forward, in ns."""
        ...

    @property
    def last_sample_ns(self) -> int:
        """Duration of the last sampling, in ns."""
        ...

    def forget(self, request_id: int) -> None:
        """Drop what is kept for a request (its random generator, ...); called once when it ends."""
        ...


UNKNOWN_TOKEN: Final = -1
"""Stands, in a step that is launched, for the token that the step launched before it samples for that request."""


class LaunchedStep(Protocol):
    """A step that a device works at."""

    def wait(self) -> list[int | None]:
        """Wait until it is done; what `Runner.execute` would have returned or raised.

        Sets the runner's `last_execute_ns` and `last_sample_ns` to what the device took for it.
        """
        ...


class LaunchingRunner(Runner, Protocol):
    """A runner that need not be waited for."""

    def launch(self, output: SchedulerOutput) -> LaunchedStep:
        """Begin a step behind all that was begun before, `copy_blocks` included, and return at once.

        A request's last known token may be `UNKNOWN_TOKEN`: it is then what the step launched before this one samples
        for it. Requests and block tables are read before this returns, and change afterwards.

        At most one other step is in flight meanwhile: the last but one has been waited for.
        """
        ...


class RunnerError(Exception):
    """A forward that failed for some requests.

    Attributes:
        request_ids: Those that must end with this error; empty means the whole batch.
    """

    def __init__(self, message: str, request_ids: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.request_ids = tuple(request_ids)


class TextStream(Protocol):
    """Turns one request's tokens into text as they come."""

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while it ends in half a character."""
        ...

    def flush(self) -> str:
        """What is still held back, at the end of the output."""
        ...


class TextCodec(Protocol):
    """Text to tokens and back."""

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, with the special tokens that the model wants in front."""
        ...

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Tokens of a conversation (`role`, `content`) in the model's chat template, up to where it answers."""
        ...

    def stream(self, prompt_token_ids: Sequence[int]) -> TextStream:
        """A stream for the output that follows a prompt."""
        ...

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each token; joined they give the whole text, special tokens included by name."""
        ...
