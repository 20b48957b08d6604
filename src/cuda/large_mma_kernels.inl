// The instantiations for one 16-bit type.  ATTNFOLD_ELEMENT is its C++ type and ATTNFOLD_KERNELS
// the name of the function that lists them.
namespace attnfold::cuda {
namespace {

template <int kDim, int kStages>
LargeKernel large_mma_kernel() {
  using Shape = MmaShape<kDim, kStages>;
  return {kDim, kMmaThreads, sizeof(typename Shape::Shared),
          reinterpret_cast<const void*>(&attend_large_mma<Shape, ATTNFOLD_ELEMENT, false>),
          reinterpret_cast<const void*>(&attend_large_mma<Shape, ATTNFOLD_ELEMENT, true>)};
}

}  // namespace

// The first that finds room is taken.
LargeKernelList ATTNFOLD_KERNELS() {
  static const LargeKernel large[] = {large_mma_kernel<64, 2>(), large_mma_kernel<128, 2>(),
                                      large_mma_kernel<128, 1>(), large_mma_kernel<256, 1>()};
  return {large, sizeof(large) / sizeof(*large)};
}

}  // namespace attnfold::cuda
