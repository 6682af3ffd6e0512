"""Version of the package, and of the torch that its native part was built for."""

__version__ = "0.1.0"

#: ``major.minor`` of torch. torch's classes change between minor versions, so the native part serves exactly one.
TORCH_VERSION = "2.11"
