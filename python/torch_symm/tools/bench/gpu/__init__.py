"""The clock of GPUs: symm against NCCL, NCCL with registered windows and torch's symmetric memory.

`torch-symm bench --device cuda` and the programs of benches/ for GPUs use it; ``benches/gpu_collectives.py`` shows
all of a run.

How a cell (operation, dtype, size) is measured:

1. Every rank process has one GPU and holds one group per side, all in the same run. A side that cannot be made, or
   cannot do an operation, is named with its reason and left out; the run goes on.
2. Each side makes one call on fresh random tensors and is compared with a float64 reference that every rank computes
   from the seeds of all ranks. Then its calls are captured into a CUDA graph (20 below 4 MB, 5 from there on), which is
   replayed and compared as well. A wrong result is reported, and its figure withheld.
3. Turns of the sides alternate (7; 3 with ``--quick`` or when the run is behind its budget), every second turn in the
   opposite order. In a turn, all ranks start together; an untimed replay absorbs the skew of the start and a second one
   is timed between two CUDA events. The same is done with as many eager calls, after 3 untimed ones.
   Afterwards as many calls in a row are made once more and compared.
4. A turn took as long as its slowest rank; the figure is the median over turns, per call.

The barrier: in a graph, the device's alone, as the streams meet; eagerly, the host waits until all have come, which is
what ``dist.barrier`` does and what torch's barrier of signal pads is made to do by waiting for its stream.

Host time of a call: 100 synchronous calls of all_reduce of 64 KB by the clock of the host, which does not wait for the
GPU; entered at three levels (``benches/gpu_host.py``), so that the time of torch.distributed's Python and of its
dispatcher can be told from the backend's. For CPU tensors it is the time of the calls.

What goes wrong costs one side, not the run:

- A call that raises is noted; the side gets a new group, three times.
- A side that times out (groups wait 20 s) is given up at once.
- When a rank dies, or no rank gets on for 45 s, all processes are ended, and new ones go on at that cell without the
  side that it happened in.
- Once the time of ``--seconds`` is over no further cell begins. The JSON is written after every cell.

Sizes: the tensor for all_reduce, broadcast and send/recv; the sum over ranks for all_gather (output), reduce_scatter
and all_to_all (input). send/recv is a ping-pong of ranks 0 and 1, and its time half a round trip.

NVLink multicast is switched off for every side unless the environment says otherwise (`machine.MULTICAST_SETTINGS`),
and NCCL's watchdog ends calls instead of processes (`launch.PATIENT_SETTINGS`).

Modules, from leaf to root: `inputs`, `calls`, `torch_calls`, `meeting`, `clock`, `sides`, `record`, `process`, `cell`,
`rank`, `launch`.
"""
