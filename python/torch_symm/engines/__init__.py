"""Plug-ins by which inference engines run their collectives on symm; each is off unless its setting switches it on."""
