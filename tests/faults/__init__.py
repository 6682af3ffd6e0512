"""The fault matrix: what the ranks of a job observe when something fails, with Gloo and with symm in one run.

`python tests/faults` runs it. A case is a function that injects one fault into real processes and returns their
observations. The case also has symm's promise for it as data, and `broken` compares the two.
"""
