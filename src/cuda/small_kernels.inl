// The instantiations for one 16-bit type.  ATTNFOLD_ELEMENT is its C++ type, ATTNFOLD_DTYPE its
// DType, and ATTNFOLD_KERNELS the name of the function that lists them.
namespace attnfold::cuda {
namespace {

template <int kDim, int kRowTiles>
SmallKernel small_kernel() {
  using Shape = SmallShape<kDim, kRowTiles, false>;
  using Claiming = SmallShape<kDim, kRowTiles, true>;
  return {ATTNFOLD_DTYPE,
          kDim,
          kRowTiles,
          Shape::kBlocksPerSm,
          kBlockThreads,
          sizeof(typename Shape::Shared),
          reinterpret_cast<const void*>(&attend_small<Shape, ATTNFOLD_ELEMENT>),
          reinterpret_cast<const void*>(&attend_small<Claiming, ATTNFOLD_ELEMENT>)};
}

}  // namespace

KernelList ATTNFOLD_KERNELS() {
  static const SmallKernel small[] = {small_kernel<64, 1>(),  small_kernel<64, 2>(),
                                      small_kernel<128, 1>(), small_kernel<128, 2>(),
                                      small_kernel<256, 1>(), small_kernel<256, 2>()};
  return {small,
          sizeof(small) / sizeof(*small),
          {kFoldThreads, reinterpret_cast<const void*>(&fold_states<ATTNFOLD_ELEMENT, 4>),
           reinterpret_cast<const void*>(&fold_states<ATTNFOLD_ELEMENT, 2>),
           reinterpret_cast<const void*>(&fold_runs<ATTNFOLD_ELEMENT>)}};
}

}  // namespace attnfold::cuda
