// 2^x for one lane type.  No include guard: included once inside each namespace that defines `Lanes` (float, or 16 floats)
// and the operations named below, so that scalar, SIMD and device code evaluate one polynomial in one order.
//
// x <= 127.  exp2_lanes(0) == 1 and exp2_lanes(-inf) == 0 exactly; below 2^-126 the result is 0; NaN gives NaN.
// Relative error at most 6.8e-8 (1.14 x 2^-24) on every float: minimax polynomial of degree 6 on [-1/2, 1/2] with constant term 1.

ATTNFOLD_LANE_FN Lanes exp2_lanes(Lanes x) {
  const Lanes bounded = max_keep_nan(splat(-127.0f), x);  // the second operand, if it is NaN
  const Lanes n = round_to_even(bounded);
  const Lanes f = sub(bounded, n);  // exact, in [-1/2, 1/2]
  Lanes p = splat(1.53264627e-4f);
  p = fma(p, f, splat(1.33908063e-3f));
  p = fma(p, f, splat(9.61850584e-3f));
  p = fma(p, f, splat(5.55035993e-2f));
  p = fma(p, f, splat(2.40226477e-1f));
  p = fma(p, f, splat(6.93147182e-1f));
  p = fma(p, f, splat(1.0f));
  return zero_below(x, -126.0f, scale_by_power_of_two(p, n));
}
