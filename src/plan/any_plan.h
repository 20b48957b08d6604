// What a plan of any backend does, as the C ABI sees it.
#pragma once

#include <cstddef>

#include "attnfold/attnfold.h"
#include "status.h"

namespace attnfold {

class AnyPlan {
 public:
  virtual ~AnyPlan() = default;

  virtual Status update(const attnfold_lengths* lengths, void* stream) = 0;
  virtual Status run(const attnfold_tensors* tensors, void* workspace, size_t workspace_bytes,
                     void* stream) const = 0;
  virtual size_t workspace_bytes() const = 0;
  virtual Status report(attnfold_plan_report* out) const = 0;
  virtual Status item(int32_t index, attnfold_plan_item* out) const = 0;
  virtual const char* kernel() const = 0;
  virtual const char* numerics_id() const = 0;
};

}  // namespace attnfold
