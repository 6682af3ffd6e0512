"""The fault matrix: what happens to the ranks of a job when something goes wrong, with Gloo and with symm in one run.

`python tests/faults` runs it. A case is a function that plays one fault on real processes and says what they saw; what
symm promises for it stands beside it as data, and `kept` compares the two.
"""
