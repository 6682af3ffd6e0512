"""torchft makes a new group for every quorum; the class below makes it a group of symm."""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch_symm
from common import model_and_optimizer, tell
from torchft.process_group import ProcessGroupGloo, ProcessGroupWrapper


class ProcessGroupSymm(ProcessGroupWrapper):
    def _create_pg(self, store: dist.Store, rank: int, world_size: int) -> dist.ProcessGroup:
        kind = dist.ProcessGroup.BackendType.CUSTOM
        group = dist.ProcessGroup(store, rank, world_size)
        group._set_default_backend(kind)
        backend = torch_symm.ProcessGroupSymm(store, rank, world_size, timeout=self._timeout)
        group._register_backend(torch.device("cpu"), kind, backend)
        return group

    def getBackendName(self) -> str:
        return "torchft-symm"


rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
# Both ranks get the same results, through one of torch's own groups.
dist.init_process_group(sys.argv[1], timeout=timedelta(seconds=60))
store = dist.TCPStore("localhost", 0, is_master=True)
ports = [store.port]
dist.broadcast_object_list(ports)
group = (ProcessGroupSymm if sys.argv[1] == "symm" else ProcessGroupGloo)(timeout=timedelta(seconds=30))
sums = []
for quorum in range(3):
    group.configure(f"localhost:{ports[0]}/quorum-{quorum}", f"replica-{rank}", rank, world, quorum_id=quorum)
    for _ in range(2):
        tensor = torch.full((100,), float(rank + quorum))
        group.allreduce([tensor], dist.ReduceOp.SUM).wait()
        sums.append(tensor.mean())
group.shutdown()
for _ in range(5):
    dist.barrier()
tell(model_and_optimizer()[0], sums)
dist.destroy_process_group()
