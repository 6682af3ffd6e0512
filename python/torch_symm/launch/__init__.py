"""The one way to start rank processes and to end them, for tools and tests.

Modules, from leaf to root: `watch`, which ranks do not get on; `messages`, what ranks report; `ranks`, processes by
fork, by ``multiprocessing`` or as programs.
"""
