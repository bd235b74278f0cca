# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: pictures of the unparallelised training state, in plain torch.

parts       what a rank holds of a tensor, as boxes
manifest    what lies where in a checkpoint's folder
writing     choose, stage, write
reading     any part from any chunks
commit      nothing is there until all of it is there
retention   what may go now that something newer is there
remote      the same in stores that cannot rename
memory      snapshots in shared memory that outlive their processes
dcp         the same files, described for torch.distributed.checkpoint
"""
