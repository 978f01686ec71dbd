"""One checkpoint format for every stage and world size, keyed by parameter name.

A checkpoint is a folder:

    rank_00000.safetensors ...   what each rank holds: slices `buffer|name|start` of flattened tensors
    index.json                   shapes, dtypes, slices, file hashes, group settings and scalars by name,
                                 and the trainer's state
    COMPLETE                     SHA-256 of index.json, written last: without it there is no checkpoint

and beside the folders `latest`, a file with the name of the one that was committed last.

Buffers are `master` (fp32 weights), the optimizer's (`exp_avg`, `last_grad`, ...), `module` (persistent
buffers and frozen parameters, written by rank 0) and `rng`. Any reader takes any range of any parameter
from whichever files hold it; no pickle, no DeepSpeed needed to read.
"""

from mars_ds.checkpoint.reader import CheckpointReader, choose_checkpoint, find_checkpoints, newest_checkpoint
from mars_ds.checkpoint.writer import write_checkpoint

__all__ = ["CheckpointReader", "choose_checkpoint", "find_checkpoints", "newest_checkpoint", "write_checkpoint"]
