#!/usr/bin/env bash
# compile_with_nvcc.sh NVCC SOURCE INCLUDE_DIR OBJECT: compiles a .cu for host and device; exits with 77 where nvcc is absent.
set -u
nvcc=$1 source=$2 include=$3 object=$4
if [ ! -x "$nvcc" ]; then
  echo "SKIPPED: no nvcc on this machine, so nothing shows that src/core compiles as device code"
  exit 77
fi
"$nvcc" --version | tail -n 2
"$nvcc" -std=c++20 -arch=sm_80 -fmad=false -ftz=false -Werror all-warnings -Xcompiler -Wall,-Wextra,-ffp-contract=off \
  -I "$include" -c "$source" -o "$object" && [ -s "$object" ]
