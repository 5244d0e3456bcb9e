#!/bin/sh
# Compiles every kernel for every architecture with NVRTC from wheels: no GPU, driver or toolkit is needed.
# Usage: tests/nvrtc.sh [folder for the virtual environment]
set -eu
venv=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/toolstorm/nvrtc-13.0}
if [ ! -x "$venv/bin/pip" ]; then
  python3 -m venv "$venv"
  # CUDA 13.0 to the letter: newer compilers emit code that a 13.0 driver refuses.
  "$venv/bin/pip" install --quiet 'nvidia-cuda-nvrtc==13.0.*'
fi
libraries=$(echo "$venv"/lib/python3*/site-packages/nvidia/cu13/lib)
LD_LIBRARY_PATH="$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" \
  cargo test --lib device::cuda::compile -- --ignored
