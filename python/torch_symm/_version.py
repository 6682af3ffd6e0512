"""Version of the package, and the versions of torch that it supports."""

__version__ = "0.1.0"

#: ``major.minor`` of torch, oldest first. torch's classes change between minor versions: the package holds one
#: extension for each.
TORCH_VERSIONS = ("2.11", "2.12", "2.13", "2.14", "2.15")

_major, _minor = TORCH_VERSIONS[-1].split(".")
#: The same versions, as a requirement for pip.
TORCH_REQUIREMENT = f"torch>={TORCH_VERSIONS[0]},<{_major}.{int(_minor) + 1}"
