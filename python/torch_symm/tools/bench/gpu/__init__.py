"""The clock of GPUs: symm against NCCL, NCCL with registered windows and torch's symmetric memory.

`torch-symm bench --device cuda` and the GPU programs of benches/ use it; ``benches/gpu_collectives.py`` shows a whole
run.

How a cell (operation, dtype, size) is measured:

1. Every rank process has one GPU and holds one group per side, all in the same run. A side that cannot be made, or
   cannot run an operation, is reported with the reason and left out; the run continues.
2. Each side makes one call on new random tensors and is compared with a float64 reference that every rank computes from
   the seeds of all ranks. Then its calls are captured into a CUDA graph (20 below 4 MB, 5 from there on), which is
   replayed and compared as well. A wrong result is reported, and its figure withheld.
3. Turns of the sides alternate (7; 3 with ``--quick`` or when the run is behind its budget), every second turn in the
   opposite order. In a turn, all ranks start together; an untimed replay absorbs the skew of the start and a second one
   is timed between two CUDA events. The same number of eager calls is timed likewise, after 3 untimed ones. Afterwards,
   the same number of calls in a row is made once more and compared.
4. A turn took as long as its slowest rank; the figure is the median over turns, per call.

The barrier: in a graph it synchronises only the devices, because only their streams meet. In eager calls the host waits
until all ranks have arrived, as ``dist.barrier`` does, and as torch's barrier of signal pads does when the host waits
for its stream.

Host time of a call: the host's clock times 100 synchronous calls of all_reduce of 64 KB without waiting for the GPU.
The calls enter at three levels (``benches/gpu_host.py``), to separate the time of torch.distributed's Python code and
of its dispatcher from the time of the backend. On CPU tensors the figures are times of whole calls.

A failure costs one side, not the run:

- A call that raises is noted; the side gets a new group, up to three times.
- A side that times out (groups wait 20 s) is abandoned at once.
- When a rank dies, or no rank advances for 45 s, all processes are ended, and new ones continue at that cell without
  the side in which it happened.
- Once the time of ``--seconds`` is over, no further cell starts. The JSON is written after every cell.

Sizes: the tensor for all_reduce, broadcast and send/recv; the sum over ranks for all_gather (output), reduce_scatter
and all_to_all (input). send/recv is a ping-pong of ranks 0 and 1, and its time half a round trip.

NVLink multicast is switched off for every side unless the environment says otherwise (`machine.MULTICAST_SETTINGS`),
and NCCL's watchdog ends calls instead of processes (`launch.PATIENT_SETTINGS`).

`overlap` measures the same calls while matrix products run on the GPU.

Modules, from leaf to root: `inputs`, `norm`, `calls`, `torch_calls`, `copies`, `rank_sync`, `clock`, `contenders`,
`engines`, `record`, `exact_inputs`, `process`, `cell`, `overlap`, `rank`, `launch`.
"""
