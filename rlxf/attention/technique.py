"""What every technique has, whatever it answers: what it says of itself, and what it does not go with."""

from typing import ClassVar, Protocol


class Choices(Protocol):
    """What a `TransformerSpec` has, as its techniques see it."""

    @property
    def position(self) -> object: ...
    @property
    def pattern(self) -> object: ...
    @property
    def kernel(self) -> object: ...
    @property
    def memory(self) -> object: ...
    @property
    def residual(self) -> object: ...
    @property
    def depth(self) -> object: ...
    @property
    def width(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def norm(self) -> str: ...
    @property
    def causal(self) -> bool: ...
    @property
    def cross_attention(self) -> bool: ...


class Technique:
    """One way to answer one question about a transformer: the base of all, frozen dataclasses.

    ``paper`` is where it comes from, ``causal`` whose causal form it is, the paper's or ours, and ``cost``,
    in the length L, what it costs beside what is there anyway.
    """

    paper: ClassVar[str]
    causal: ClassVar[str]
    cost: ClassVar[str]

    def check(self, choices: Choices) -> None:
        """Raise ValueError unless it is compatible with the sizes and the other choices of a transformer.

        A spec that passes all checks can be built: `build` raises no further errors.
        """
