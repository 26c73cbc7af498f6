"""Torch's own loaders, with which ours are compared, take less long to start workers and to give up."""

import multiprocessing

import torch
from torch.utils.data import _utils

# Processes of pytest are more than processors, and threads of OpenMP spin while they wait for each other: beside other
# work, a hundred steps of a tiny model took 20 s of processor time with two threads, and 0.5 with one.
torch.set_num_threads(1)

# Python's own fork server imports torch once, for all that it forks: two seconds of processor time for each.
multiprocessing.set_forkserver_preload(["torch", "penstock.pytorch"])

# Torch's own loaders wait so long for each worker when they are collected late, after an error: 5 s in a test that
# compares with them, or in whichever comes next.
_utils.MP_STATUS_CHECK_INTERVAL = 0.5
