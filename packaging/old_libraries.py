"""Libraries to link against that have only the symbols of systems with glibc 2.28 and GCC 8, for manylinux_2_28.

zig includes the libraries of glibc. libstdc++.so is made here: it has the symbols of the system's libstdc++.so.6 up to
the versions that the policy allows
(https://github.com/pypa/auditwheel/blob/main/src/auditwheel/policy/manylinux-policy.json). Newer symbols come from
libstdc++.a and are hidden in our libraries, as with the compilers of manylinux images.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

#: The last versions that manylinux_2_28 allows.
NEWEST = {"GLIBCXX_3.4": 24, "CXXABI_1.3": 11}


def _allowed(version: str) -> int | None:
    """Returns the last number of an allowed version, such as 24 of ``GLIBCXX_3.4.24``; ``None`` for any other."""
    for family, newest in NEWEST.items():
        if match := re.fullmatch(re.escape(family) + r"(?:\.(\d+))?", version):
            number = int(match[1] or 0)
            return number if number <= newest else None
    return None


def link_flags(folder: Path, compiler: str = "g++") -> str:
    """Writes the libraries into ``folder``; returns the flags that replace the linker's own libraries."""
    folder.mkdir(parents=True, exist_ok=True)
    glibc, rest_of_glibc = _glibc(folder / "glibc")
    files = [_libstdcxx(folder, compiler), *(_file_of(compiler, name) for name in ("libstdc++.a", "libgcc_s.so.1"))]
    files += [_file_of(compiler, "libgcc.a")]
    files += [str(glibc / name) for name in ("libm.so.6", "libc.so.6", "libpthread.so.0", "libdl.so.2")]
    return " ".join(["-nodefaultlibs", "-Wl,--as-needed", *files, str(rest_of_glibc)])


def _glibc(folder: Path) -> tuple[Path, Path]:
    """Returns the directory of the shared libraries of glibc 2.28, and the archive with the rest of the symbols."""
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "empty.c"
    source.touch()
    command = [sys.executable, "-m", "ziglang", "cc", "-target", f"{platform.machine()}-linux-gnu.2.28", "-shared"]
    command += ["-o", str(folder / "empty.so"), str(source), "-ldl", "-lpthread", "-lm"]
    caches = {"ZIG_GLOBAL_CACHE_DIR": str(folder), "ZIG_LOCAL_CACHE_DIR": str(folder)}
    subprocess.run(command, check=True, env={**os.environ, **caches})
    return next(folder.rglob("libc.so.6")).parent, next(folder.rglob("libc_nonshared.a"))


def _libstdcxx(folder: Path, compiler: str) -> str:
    system = _file_of(compiler, "libstdc++.so.6")
    table = subprocess.run(["readelf", "-W", "--dyn-syms", system], check=True, capture_output=True, text=True).stdout
    kept: dict[str, tuple[int, str, str]] = {}
    for line in table.splitlines():
        fields = line.split()
        if len(fields) != 8 or fields[6] == "UND" or "@" not in fields[7]:
            continue
        name, _, version = fields[7].replace("@@", "@").partition("@")
        number = _allowed(version)
        if number is not None and (name not in kept or kept[name][0] < number):
            kept[name] = (number, version, {"FUNC": "function", "TLS": "tls_object"}.get(fields[3], "object"))
    names = defaultdict(list)
    code = []
    for name, (_, version, kind) in sorted(kept.items()):
        names[version].append(name)
        code.append(f'.globl "{name}"\n.type "{name}", @{kind}\n"{name}": .quad 0\n')
    script = [
        f"{version} {{ global: {' '.join(f'{name};' for name in of)} }};\n" for version, of in sorted(names.items())
    ]
    (folder / "stub.s").write_text("".join([".data\n", *code, '.section .note.GNU-stack,"",@progbits\n']))
    (folder / "stub.map").write_text("".join(script))
    library = folder / "libstdc++.so"
    command = [
        compiler,
        "-shared",
        "-nostdlib",
        "-Wl,-soname,libstdc++.so.6",
        f"-Wl,--version-script={folder}/stub.map",
    ]
    subprocess.run([*command, "-o", str(library), str(folder / "stub.s")], check=True)
    return str(library)


def _file_of(compiler: str, name: str) -> str:
    command = [compiler, f"-print-file-name={name}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
