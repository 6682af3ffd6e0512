"""The links between GPUs, as reported to Python. The rest is tested in Rust, with tables."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch_symm
from torch_symm._native import load

#: On a node with GPUs the first rows of a file belong to those GPUs, whose names are not known here.
without_gpus = pytest.mark.skipif(bool(list(Path("/dev").glob("nvidia[0-9]*"))), reason="for a host without GPUs")
PAIRS = [[0, 4, 0, 0], [4, 0, 0, 0], [0, 0, 0, 4], [0, 0, 4, 0]]


def describe(file: Path, links: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes ``file`` the topology of the ranks. Each rank reads it only once."""
    file.write_text(json.dumps({"gpus": len(links), "links": links, "p2p": True}))
    monkeypatch.setenv("SYMM_TOPOLOGY_FILE", str(file))
    return file


@pytest.fixture
def pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four GPUs, bridged in pairs."""
    return describe(tmp_path / "pairs.json", PAIRS, monkeypatch)


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return describe(tmp_path / "faulty.json", [[0, 1], [2, 0]], monkeypatch)


@pytest.mark.parametrize("types", [("cpu", "nvlink"), ("cuda", "pcie"), ("CUDA", "nvlink"), ("", "")])
def test_other_types_are_refused(types: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match="is not known here: there is 'cuda' by 'nvlink'"):
        torch_symm.detect_dma_connectivity(*types)


def test_without_devices_the_matrix_is_empty() -> None:
    """Works on any node: CUDA_VISIBLE_DEVICES can have the same effect."""
    code = "print(torch_symm.detect_dma_connectivity('cuda', 'nvlink'))"
    command = [sys.executable, "-c", "import torch_symm\n" + code]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=True).stdout
    assert shown.strip() == "DMAConnectivity(device_type='cuda', connection_type='nvlink', matrix=[])"


def test_the_answer_is_frozen() -> None:
    answer = torch_symm.DMAConnectivity("cuda", "nvlink", [[0]])
    with pytest.raises(dataclasses.FrozenInstanceError):
        answer.matrix = []  # type: ignore[misc]


@without_gpus
@pytest.mark.ranks(1, backend=None)
@pytest.mark.usefixtures("pairs")
def test_devices_are_asked_for_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPUs of the devices, in torch's order, get their rows of the file."""
    order = [3, 0, 2]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(order))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"injected-{order[device]}")
    )
    assert torch_symm.detect_dma_connectivity("cuda", "nvlink").matrix == [[0, 0, 4], [0, 0, 0], [4, 0, 0]]


@pytest.mark.ranks(1, backend=None)
def test_an_unknown_device_is_named(pairs: Path) -> None:
    with pytest.raises(torch_symm.SymmConfigError) as error:
        load()._nvlink_matrix(["GPU-elsewhere"])
    assert str(error.value) == f"GPU elsewhere is not among the first 4 of this node, which {pairs} describes"


@without_gpus
@pytest.mark.ranks(1, backend=None)
def test_the_report_is_a_table(pairs: Path) -> None:
    lines = torch_symm.topology().splitlines()
    assert lines[0] == f"4 GPUs, PCIe ({pairs})"
    assert [line.split()[:5] for line in lines[3:5]] == [
        ["GPU0", "X", "NV4", "NODE", "NODE"],
        ["GPU1", "NV4", "X", "NODE", "NODE"],
    ]


@pytest.mark.ranks(1, backend=None)
def test_a_faulty_file_is_named(faulty: Path) -> None:
    with pytest.raises(torch_symm.SymmConfigError) as error:
        torch_symm.topology()
    assert str(error.value) == f"topology file {faulty}: links: [0][1] is 1, but [1][0] is 2"


@without_gpus
def test_a_host_without_nvml_says_so() -> None:
    assert torch_symm.topology().startswith("0 GPUs, unknown (NVML does not start: ")
