"""What pyproject.toml cannot say: no build path may stay in the extension."""

import os
from pathlib import Path

from setuptools import setup

home = Path.home()
# Of several prefixes that match, the last wins.
places = {
    home: "home",
    Path(os.environ.get("CARGO_HOME", home / ".cargo")): "cargo",
    Path(os.environ.get("RUSTUP_HOME", home / ".rustup")): "rustup",
    Path(__file__).resolve().parent: "torch-symm",
}
# cargo reads the first of these that is set; what the caller asks for stays.
encoded = os.environ.get("CARGO_ENCODED_RUSTFLAGS")
flags = encoded.split("\x1f") if encoded else os.environ.get("RUSTFLAGS", "").split()
flags += [f"--remap-path-prefix={place}={name}" for place, name in places.items()]
os.environ["CARGO_ENCODED_RUSTFLAGS"] = "\x1f".join(flags)
# The C++ part of cxx names its own source in messages.
maps = [f"-ffile-prefix-map={place}={name}" for place, name in places.items()]
os.environ["CXXFLAGS"] = " ".join([os.environ.get("CXXFLAGS", ""), *maps]).strip()

setup()
