"""Base class of all techniques: metadata and compatibility checks."""

from typing import ClassVar, Protocol


class SpecView(Protocol):
    """Read-only view of a `TransformerSpec` for the checks of techniques."""

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
    """Base of all techniques: frozen dataclasses, one per option of an axis of a transformer.

    ``paper`` is the source and ``causal`` the origin of the causal form: the paper or this library. ``cost``
    is the additional cost as a function of the sequence length L.
    """

    paper: ClassVar[str]
    causal: ClassVar[str]
    cost: ClassVar[str]

    def check(self, choices: SpecView) -> None:
        """Raise ValueError unless this technique is compatible with the other settings of a transformer.

        A spec that passes all checks can be built: `build` raises no further errors.
        """
