"""``torch_symm.log_to_python``: log lines of the core in Python's logging, also in children and at process exit."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch_symm
from torch_symm import _logging
from torch_symm._native import load


class Kept(logging.Handler):
    """Keeps records."""

    def __init__(self) -> None:
        super().__init__(_logging.TRACE)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def kept() -> Iterator[Kept]:
    handler, logger = Kept(), logging.getLogger("torch_symm")
    logger.addHandler(handler)
    logger.setLevel(_logging.TRACE)
    yield handler
    _logging.end()
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_lines_come_with_name_level_and_time(kept: Kept, capfd: pytest.CaptureFixture[str]) -> None:
    torch_symm.log_to_python("info")
    before = time.time()
    load()._log_info("one line")
    until(lambda: any(record.getMessage() == "one line" for record in kept.records))
    (record,) = [record for record in kept.records if record.getMessage() == "one line"]
    assert (record.name, record.levelno) == ("torch_symm.bridge.log", logging.INFO)
    assert abs(record.created - before) < 20 and 0 <= record.msecs < 1000
    torch_symm.log_to_python("warning")
    load()._log_info("below")
    torch_symm.log_to_python(logging.INFO)
    load()._log_info("100 % {braces} %s")
    _logging.end()
    said = [record.getMessage() for record in kept.records]
    assert said[-1] == "100 % {braces} %s" and "below" not in said
    load()._log_info("to standard error, which SYMM_LOG=warn does not pass")
    assert "one line" not in capfd.readouterr().err


@pytest.mark.ranks(1, backend=None, env={"SYMM_LOG": "info", "SYMM_SPIN": "9"})
def test_a_line_names_the_rank_or_the_process(tmp_path: Path) -> None:
    """Neither process has logged before; the parent has no rank, and the child has one."""
    del os.environ["RANK"], os.environ["SYMM_TRACE_DIR"]
    os.dup2(os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT), 2)
    load()._log_info("one line")
    if (child := os.fork()) == 0:
        os.environ["RANK"] = "3"
        load()._log_info("one line")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    settings = "settings: SYMM_LOG=info, SYMM_SPIN=9; all others have their defaults"
    assert (tmp_path / "log").read_text().splitlines() == [
        f"[INFO  symm::{place} {who}] {line}"
        for who in (f"pid {os.getpid()}", "rank 3")
        for place, line in (("config", settings), ("bridge::log", "one line"))
    ]


def test_levels_are_those_of_logging() -> None:
    names = ["", "trace", "trace", "debug", "info", "info", "warn", "error", "off", "off"]
    levels = [None, 0, "NOTSET", "debug", logging.INFO, 11, "warning", logging.ERROR, logging.CRITICAL, "off"]
    assert [_logging._filter(level) for level in levels] == names
    with pytest.raises(ValueError, match="no level 'loud'; there are trace, debug"):
        torch_symm.log_to_python("loud")


def test_a_handler_that_raises_and_one_that_waits_lose_nothing(kept: Kept, capsys: pytest.CaptureFixture[str]) -> None:
    torch_symm.log_to_python("info")
    go, logger = threading.Event(), logging.getLogger("torch_symm.bridge.log")

    def slow(record: logging.LogRecord) -> bool:
        go.wait(20)
        if record.getMessage() == "bad":
            raise RuntimeError("a filter of the program's")
        return True

    logger.addFilter(slow)
    try:
        for text in ("first", "bad", "last"):
            load()._log_info(text)
        assert not kept.records, "who logs does not wait for handlers"
        go.set()
        _logging.end()
    finally:
        logger.removeFilter(slow)
    assert [record.getMessage() for record in kept.records] == ["first", "last"]
    assert "INFO symm::bridge::log: bad" in capsys.readouterr().err


@pytest.mark.ranks(2)
def test_a_forked_child_goes_on(kept: Kept) -> None:
    torch_symm.log_to_python("debug")
    dist.new_group()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        kept.records.clear()
        load()._log_info("of the child")
        until(lambda: bool(kept.records))
        os.write(write, kept.records[-1].getMessage().encode())
        os._exit(0)
    assert os.read(read, 100) == b"of the child"
    assert os.waitpid(pid, 0)[1] == 0
    load()._log_info("of the parent")
    _logging.end()
    said = [record.getMessage() for record in kept.records]
    assert "of the parent" in said and "of the child" not in said
    assert all(record.name.startswith("torch_symm.") for record in kept.records)


PROGRAM = """
import logging, torch, torch.distributed as dist, torch_symm
from torch_symm._native import load
logging.basicConfig(level=logging.INFO, format="%(name)s|%(levelname)s|%(message)s")
torch_symm.log_to_python(logging.INFO)
dist.init_process_group("symm", store=torch_symm.MemoryStore(), rank=0, world_size=1)
for number in range(2000):
    load()._log_info(f"line {number}")
"""


def test_nothing_is_lost_at_the_end_of_a_program() -> None:
    ended: Any = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    said = [line.rpartition("|")[2] for line in ended.stderr.splitlines() if "torch_symm.bridge.log|INFO|line " in line]
    assert said == [f"line {number}" for number in range(2000)]
