"""The fault matrix: what the ranks of a job see when something fails, with Gloo and with symm in one run.

`python tests/faults` runs it. A case is a function that plays one fault on real processes and returns what they saw;
symm's promise for it is data in the case, and `broken` compares the two.
"""
