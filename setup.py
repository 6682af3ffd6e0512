"""What pyproject.toml cannot say: no build path may stay in the extension."""

import os
from pathlib import Path

from setuptools import setup

cargo_home = os.environ.get("CARGO_HOME", str(Path.home() / ".cargo"))
flags = [
    f"--remap-path-prefix={Path(__file__).resolve().parent}=torch-symm",
    f"--remap-path-prefix={cargo_home}=cargo",
]
os.environ["CARGO_ENCODED_RUSTFLAGS"] = "\x1f".join(flags)

setup()
