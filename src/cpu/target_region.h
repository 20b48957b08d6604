// Opens a region of functions compiled for an instruction set, without compiling the file for it:
// what was included before stays baseline, so the linker can never hand a caller on an older CPU a
// body that it cannot run.
#pragma once

#define ATTNFOLD_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define ATTNFOLD_TARGET_BEGIN(isa) \
  ATTNFOLD_PRAGMA(clang attribute push(__attribute__((target(isa))), apply_to = function))
#define ATTNFOLD_TARGET_END _Pragma("clang attribute pop")
#else
#define ATTNFOLD_TARGET_BEGIN(isa) _Pragma("GCC push_options") ATTNFOLD_PRAGMA(GCC target(isa))
#define ATTNFOLD_TARGET_END _Pragma("GCC pop_options")
#endif
