#!/bin/sh
# Four servers somewhere on a Ray cluster (RAY_ADDRESS, or a new one on this machine); Ray restarts the lost.
set -eu
python augmentation.py
penstock serve plan.toml --allow-code augmentation --ray "${SERVERS:-4}" --servers-file servers.txt "$@" &
servers=$!
trap 'kill $servers; wait $servers' EXIT
until [ -s servers.txt ]; do sleep 0.2; done
python train.py --remote ./servers.txt
