# The CUDA backend: machine code for sm_90a, and PTX of compute_80 that newer and older devices compile when they load it.
# No kernel is built for the machine at hand: what is built here runs on every device of the list.

enable_language(CUDA)
find_package(CUDAToolkit 12.0 REQUIRED)

# Builds for compute-sanitizer (tests/cuda/sanitize.sh).
option(ATTNFOLD_EVERY_LANE_ARRIVES "Every lane arrives on the barriers, as racecheck needs it; slower" OFF)
option(ATTNFOLD_DROP_A_WAIT "Leaves a wait out: a fault for racecheck to find" OFF)

# attnfold_compile_cuda(target): how the .cu files of a target are compiled.
function(attnfold_compile_cuda target)
  target_compile_definitions(${target} PRIVATE ATTNFOLD_WITH_CUDA
    $<$<BOOL:${ATTNFOLD_EVERY_LANE_ARRIVES}>:ATTNFOLD_EVERY_LANE_ARRIVES> $<$<BOOL:${ATTNFOLD_DROP_A_WAIT}>:ATTNFOLD_DROP_A_WAIT>)
  set_target_properties(${target} PROPERTIES CUDA_ARCHITECTURES OFF CUDA_VISIBILITY_PRESET hidden)
  target_compile_options(${target} PRIVATE
    "$<$<COMPILE_LANGUAGE:CUDA>:SHELL:-gencode=arch=compute_90a,code=sm_90a -gencode=arch=compute_80,code=compute_80>"
    # As for C++: a fused a*b+c is written where it is meant.
    "$<$<COMPILE_LANGUAGE:CUDA>:SHELL:-std=c++20 -fmad=false -ftz=false -prec-div=true --threads 2>")
  target_include_directories(${target} PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
endfunction()

# attnfold_add_cuda(target): adds the backend to an object library.
function(attnfold_add_cuda target)
  file(GLOB sources CONFIGURE_DEPENDS src/cuda/*.cpp src/cuda/*.cu)
  list(REMOVE_ITEM sources "${PROJECT_SOURCE_DIR}/src/cuda/rows.cpp")
  target_sources(${target} PRIVATE ${sources})
  attnfold_compile_cuda(${target})
endfunction()
