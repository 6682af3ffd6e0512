"""Measures the collectives of GPUs: symm against NCCL, NCCL with registered windows and torch's symmetric memory.

    python -m torch_symm.bench.gpu --help

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

Host time of a call: 100 calls of all_reduce of 64 KB by the clock of the host, which does not wait for the GPU.

Sizes: the tensor for all_reduce, broadcast and send/recv; the sum over ranks for all_gather (output), reduce_scatter
and all_to_all (input). send/recv is a ping-pong of ranks 0 and 1, and its time half a round trip.

NVLink multicast is switched off for every side unless the environment says otherwise (`machine.MULTICAST_SETTINGS`).

Modules, from leaf to root: `inputs`, `calls`, `meeting`, `clock`, `sides`, `record`, `table`, `rank`, `launch`,
``__main__``.
"""
