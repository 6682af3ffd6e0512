"""``torch-symm topo``: cores and caches as Linux lists them, the algorithms, pairs, and a drawing."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import pytest
from torch_symm import __main__ as entry
from torch_symm.tools.doctor.report import Section
from torch_symm.tools.topo import command, cpu, plot

needs_matplotlib = pytest.mark.skipif(find_spec("matplotlib") is None, reason="--plot needs matplotlib")
#: Two memory nodes of two cores with two threads each; one third-level cache per node.
FILES = {
    "node/node0/cpulist": "0-1,4-5",
    "node/node1/cpulist": "2-3,6-7",
    **{f"cpu/cpu{core}/topology/core_cpus_list": f"{core % 4},{core % 4 + 4}" for core in range(8)},
    **{f"cpu/cpu{core}/topology/physical_package_id": str(core % 4 // 2) for core in range(8)},
    **{f"cpu/cpu{core}/cache/index0/level": "1" for core in range(8)},
    **{f"cpu/cpu{core}/cache/index0/type": "Data" for core in range(8)},
    **{f"cpu/cpu{core}/cache/index0/size": "32K" for core in range(8)},
    **{f"cpu/cpu{core}/cache/index0/shared_cpu_list": f"{core % 4},{core % 4 + 4}" for core in range(8)},
    **{f"cpu/cpu{core}/cache/index1/level": "1" for core in range(8)},
    **{f"cpu/cpu{core}/cache/index1/type": "Instruction" for core in range(8)},
    **{f"cpu/cpu{core}/cache/index3/level": "3" for core in range(8)},
    **{f"cpu/cpu{core}/cache/index3/type": "Unified" for core in range(8)},
    **{f"cpu/cpu{core}/cache/index3/size": "16M" for core in range(8)},
    **{f"cpu/cpu{core}/cache/index3/shared_cpu_list": "0-1,4-5" if core % 4 < 2 else "2-3,6-7" for core in range(8)},
}


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(7)))
    monkeypatch.setattr(cpu.cgroup, "cores_allowed", lambda: 3.5)
    return tmp_path


def test_lists_of_cores_are_read_and_written() -> None:
    assert cpu.numbers("0-3,8, 10-11") == [0, 1, 2, 3, 8, 10, 11]
    assert cpu.numbers("") == []
    assert cpu.ranges([8, 0, 1, 2, 3]) == "0-3,8"
    assert cpu.ranges([]) == ""


def test_sockets_nodes_and_caches(system: Path) -> None:
    section = cpu.section(4, system)
    found = section.found
    assert (found["sockets"], found["cores"], found["limit"]) == (2, 4, 3.5)
    assert found["nodes"] == {"0": [0, 1, 4, 5], "1": [2, 3, 6, 7]}
    assert [(cache["name"], cache["size"], len(cache["shared"])) for cache in found["caches"]] == [
        ("L1d", "32K", 4),
        ("L3", "16M", 2),
    ]
    said = "\n".join(section.lines)
    assert "2 sockets, 4 cores, 7 hardware threads usable (0-6)" in said
    assert "NUMA node 1: hardware threads 2-3,6-7, usable 2-3,6" in said
    assert "L3: 16M each, of threads 0-1,4-5 | 2-3,6-7" in said
    assert "0.88 hardware threads a rank, so they wait" in said


def test_a_host_that_shows_nothing_has_one_node(tmp_path: Path) -> None:
    found = cpu.section(2, tmp_path).found
    assert found["nodes"] == {"0": sorted(os.sched_getaffinity(0))}
    assert found["caches"] == []


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_all_is_one_json_object_and_two_ranks_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(["topo", "--measure", "--json", "--ranks", "3"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"processor", "gpus", "cpu"} <= set(found)
    assert found["cpu"]["ranks"] == 3 and found["cpu"]["algorithms"]["all_reduce"]["8"]
    measured = found["measured"]
    assert measured.get("pairs") or (measured["gb_per_s"] > 0 and measured["us_of_8_bytes"] > 0)


SWITCHED = [[0 if one == other else 18 for other in range(8)] for one in range(8)]
PCIE = [[0] * 8 for _ in range(8)]
#: A DGX-1: two quads of linked GPUs, each GPU with a partner in the other quad.
CUBE_MESH = [
    [0 if one == other else 1 + (one % 4 == 3 - other % 4) if one // 4 == other // 4 else int(abs(one - other) == 4)
     for other in range(8)]
    for one in range(8)
]  # fmt: skip


def test_switches_pcie_and_single_links_are_told_apart() -> None:
    assert plot.lines(8, SWITCHED) == [(gpu, "switch", 18) for gpu in range(8)]
    assert plot.lines(8, PCIE) == plot.lines(8, []) == [(gpu, "pcie", 0) for gpu in range(8)]
    assert plot.lines(2, [[0, 18], [18, 0]]) == [(0, 1, 18)]
    assert plot.lines(3, []) == [(0, 1, 0), (0, 2, 0), (1, 2, 0)]
    mesh = plot.lines(8, CUBE_MESH)
    assert len([line for line in mesh if line[2]]) == 16 and len([line for line in mesh if line[1] == "pcie"]) == 8


@pytest.mark.parametrize(
    ("nvlinks", "hub", "labels", "spokes"),
    [
        (SWITCHED, {"switch"}, ("NVSwitch",), 8),
        (PCIE, {"pcie"}, ("PCIe and host",), 8),
        (CUBE_MESH, {"pcie"}, ("NV2",), 24),
        ([[0, 18, 0], [18, 0, 0], [0, 0, 0]], set(), ("NV18", "PCIe"), 3),
    ],
)
@needs_matplotlib
def test_gpus_are_nodes_with_links(
    nvlinks: list[list[int]], hub: set[str], labels: tuple[str, ...], spokes: int, tmp_path: Path, system: Path
) -> None:
    path, count = tmp_path / "host.svg", len(nvlinks)
    plot.draw(cpu.section(8, system).found, [{"name": "H200"}] * count, nvlinks, path)
    root = ElementTree.parse(path).getroot()
    ids = {element.get("id", "") for element in root.iter()}
    assert ids >= {*(f"gpu-{gpu}" for gpu in range(count)), "node-0", "node-1", *hub}
    drawn = [element for element in root.iter() if element.get("id", "").startswith("link-")]
    assert len(drawn) == spokes and all(any(part.get("d") for part in element.iter()) for element in drawn)
    said = "".join(root.itertext())
    assert all(word in said for word in (*labels, f"cuda:{count - 1}", "H200", "NUMA node 1")), said


@pytest.mark.slow
@needs_matplotlib
def test_a_described_host_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    described, path = tmp_path / "topology.json", tmp_path / "host.svg"
    described.write_text(json.dumps({"gpus": 8, "links": SWITCHED, "p2p": True}))
    monkeypatch.setenv("SYMM_TOPOLOGY_FILE", str(described))
    assert entry.main(["topo", "--plot", str(path)]) == 0
    if "as described" in path.read_text():  # there is no GPU here
        assert all(f'"link-{gpu}-switch"' in path.read_text() for gpu in range(8))
    else:
        assert '"gpu-0"' in path.read_text()


def test_a_drawing_that_cannot_be_written_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr("importlib.util.find_spec", lambda *_: True)
    monkeypatch.setattr(command, "_sections", lambda *_: iter([Section("cpu", {}, [])]))
    monkeypatch.setattr(plot, "draw", fails)
    assert entry.main(["topo", "--plot", str(tmp_path / "host.svg")]) == 1
    assert "failed: the disk is full" in capsys.readouterr().err


@needs_matplotlib
def test_a_host_without_gpus_shows_ranks_cores_and_shared_caches(tmp_path: Path, system: Path) -> None:
    path = tmp_path / "host.svg"
    plot.draw(cpu.section(4, system).found, [], [], path)
    root = ElementTree.parse(path).getroot()
    ids = {element.get("id", "") for element in root.iter()}
    # Threads 0 and 4 are one core; thread 7 may not be used, but its sibling 3 may.
    assert ids >= {f"{what}-{number}" for what in ("core", "L1d", "rank") for number in range(4)}
    assert ids >= {"L3-0", "L3-2", "node-0", "node-1"} and not ids & {"core-4", "L3-1", "rank-4"}
    said = "".join(root.itertext())
    assert "L3 16M" in said and "rank 3" in said and "0,4" in said
    assert "4 ranks, each on any of the hardware threads 0-6: nothing pins them" in said
