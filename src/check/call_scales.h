// Scales in call files: of keys, of values, of a quantised o.
#pragma once

#include "check/call.h"
#include "check/fields.h"

namespace attnfold::check {

/**
 * Reads `name`, k_scale or v_scale: a number in the metadata, or a tensor.  The call's types,
 * layout and sizes must be set already; sets the problem's kind.
 */
void read_scales(const Fields& file, const char* name, Call* call, attnfold_scale_kind* kind,
                 Scales* scales);

/** Reads o_scale; with one, o is in e4m3. */
void read_o_scale(const Fields& file, Call* call);

}  // namespace attnfold::check
