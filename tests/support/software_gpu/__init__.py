"""A GPU in software, for tests: CUDA's rules of order and of memory, as hostile as they allow.

`installed` puts it in the place of `torch.cuda`; then ordinary code computes on devices `cuda:0`,
`cuda:1`, ... of which every operation is run by the processor, late and in an order that is drawn
at random among all that CUDA permits. What is read before it was written is not a number.

| file | idea |
|---|---|
| `order` | queues of work, streams and events, which head runs next |
| `races` | accesses to memory that nothing orders |
| `memory` | blocks of memory: allocated, counted, freed, spoilt |
| `tensors` | tensors that say they are on a GPU, and whose operations are queued |
| `copies` | host to device and back; pinned memory |
| `runtime` | the functions of `torch.cuda` |

What it does not have: kernels of a GPU, a driver, speed, the gaps between an allocator's blocks,
graphs of CUDA, several processes. What is not emulated raises `NotEmulatedError`.
"""

from tests.support.software_gpu.order import NotEmulatedError
from tests.support.software_gpu.runtime import SoftwareGpus, installed

__all__ = ["NotEmulatedError", "SoftwareGpus", "installed"]
