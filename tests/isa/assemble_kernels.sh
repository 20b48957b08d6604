#!/usr/bin/env bash
# assemble_kernels.sh NVCC PROJECT OBJECT: assembles the kernels' PTX of compute_80 for devices that the build has no machine
# code for, as their driver would: what PTX allows may still be more than they have.  Exits with 77 where nvcc is absent.
set -u
nvcc=$1 project=$2 object=$3
if [ ! -x "$nvcc" ]; then
  echo "SKIPPED: no nvcc on this machine, so nothing shows that other devices take the kernels"
  exit 77
fi
status=0
for source in "$project"/src/cuda/*.cu; do
  echo "${source##*/}"
  "$nvcc" -gencode=arch=compute_80,code=[sm_80,sm_89] -std=c++20 -fmad=false -ftz=false -prec-div=true -DATTNFOLD_WITH_CUDA \
    --threads 2 -I "$project/src" -I "$project/include" -c "$source" -o "$object" || status=1
done
exit $status
