"""Categories of this package's warnings, so that a program can filter them apart from others'."""

from __future__ import annotations


class SymmWarning(UserWarning):
    """Of every warning that torch_symm gives through ``warnings``: all goes on, but not as one may think.

    ``warnings.filterwarnings("ignore", category=torch_symm.SymmWarning)`` silences them; ``"error"`` raises them.
    """


class SymmFallbackWarning(SymmWarning):
    """Something is done as torch or another backend does it, which is slower: the message says what, and why."""
