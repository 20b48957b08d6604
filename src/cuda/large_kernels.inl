// The instantiations for one 16-bit type.  ATTNFOLD_ELEMENT is its C++ type and ATTNFOLD_KERNELS
// the name of the function that lists them.
namespace attnfold::cuda {
namespace {

template <int kDim>
LargeKernel large_kernel() {
  using Shape = LargeShape<kDim>;
  const void* kernel = reinterpret_cast<const void*>(&attend_large<Shape, ATTNFOLD_ELEMENT>);
  return {kDim, kLargeThreads, sizeof(typename Shape::Shared), kernel, kernel};
}

}  // namespace

LargeKernelList ATTNFOLD_KERNELS() {
  static const LargeKernel large[] = {large_kernel<64>(), large_kernel<128>()};
  return {large, sizeof(large) / sizeof(*large)};
}

}  // namespace attnfold::cuda
