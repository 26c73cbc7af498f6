"""Torch's own loaders, with which ours are compared, take less long to give up."""

from torch.utils.data import _utils

# Torch's own loaders wait so long for each worker when they are collected late, after an error: 5 s in a test that
# compares with them, or in whichever comes next.
_utils.MP_STATUS_CHECK_INTERVAL = 0.5
