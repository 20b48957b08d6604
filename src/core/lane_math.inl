// 2^x and tanh for one lane type.  No include guard: included once inside each namespace that
// defines `Lanes` (float, or 16 floats) and the operations named below, so that scalar, SIMD and
// device code evaluate one polynomial in one order.

// x <= 127.  exp2_lanes(0) == 1 and exp2_lanes(-inf) == 0 exactly; below 2^-126 the result is 0;
// NaN gives NaN. Relative error at most 6.8e-8 (1.14 x 2^-24) on every float: minimax polynomial of
// degree 6 on [-1/2, 1/2] with constant term 1.

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

// tanh: below 0.625 x + x^3 P(x^2), relative error at most 1.3 x 2^-24; above 1 - 2 / (e^2x + 1) with
// the sign of x, absolute error at most 1.7 x 2^-24; both on every float.  NaN gives NaN.
ATTNFOLD_LANE_FN Lanes tanh_lanes(Lanes x) {
  const Lanes magnitude = abs(x);
  const Lanes z = mul(x, x);
  Lanes p = splat(-5.6922963e-3f);
  p = fma(p, z, splat(2.06281673e-2f));
  p = fma(p, z, splat(-5.37365153e-2f));
  p = fma(p, z, splat(1.33314058e-1f));
  p = fma(p, z, splat(-3.33332807e-1f));
  const Lanes small = fma(mul(x, z), p, x);
  // above 16 the result is 1; the bound keeps 2^x in range, and a NaN
  const Lanes bounded = min_keep_nan(splat(16.0f), magnitude);
  const Lanes e = exp2_lanes(mul(bounded, splat(2.88539008f)));  // 2 log2(e)
  const Lanes large = sub(splat(1.0f), divide(splat(2.0f), add(e, splat(1.0f))));
  return select_below(magnitude, 0.625f, small, copy_sign(large, x));
}
