"""Categories of this package's warnings, so that a program can filter them separately."""

from __future__ import annotations


class SymmWarning(UserWarning):
    """The category of all warnings of torch_symm: the program continues, but perhaps not as expected.

    ``warnings.filterwarnings("ignore", category=torch_symm.SymmWarning)`` silences them; ``"error"`` raises them.
    """


class SymmFallbackWarning(SymmWarning):
    """A call runs as in torch or another backend, which is slower: the message says which call, and why."""
