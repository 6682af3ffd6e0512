"""The only way to start and end rank processes, for tools and tests.

Modules, from leaf to root: `watch`, which detects ranks that hang; `messages`, the reports of ranks; `ranks`, processes
by fork, by ``multiprocessing`` or as programs.
"""
