"""``torch-symm check``: whether collectives compute the right results on this machine.

Every collective, type and reduction, at odd lengths, blocking and asynchronous, aligned and not, is compared bit for
bit with a reference that each rank computes; ``--faults`` also checks the errors that ranks get when one fails.
With ``--invariance``, sums of the same values in different calls are compared instead, on symm and on other backends.

Modules, from leaf to root: `reference`, `cases`, `exercise`, `rank`, `sides`, `invariance`, `faults`, `command`.
"""
